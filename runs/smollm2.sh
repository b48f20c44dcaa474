#!/bin/sh
# From nothing to drafters of every method for SmolLM2-135M-Instruct: answers, features, training.
# Unattended and resumable: the same command goes on where it stopped.
#
#   runs/smollm2.sh                         all of it, 20 minutes of training a drafter
#   MINUTES=5 runs/smollm2.sh               a first pass
#   LIMIT=8 runs/smollm2.sh --device cuda   on a GPU: 5 to 10 million tokens of answers and every
#                                           drafter in 8 minutes; what is not done by then is saved
#   METHODS="eagle3 dspark" runs/smollm2.sh
#
#   LIMIT    minutes for all of it; then MINUTES is each drafter's share of what is left
#   PROMPTS  folder of prompt files (default ../shared/data/train_prompts)
#   MOST     prompts of each file at most, evenly taken (default 700; all on cuda)
#   WRITTEN  prompts that the target writes itself, besides (default 1300; 24000 on cuda)
#   DERIVED  tenth part of the prompts that are made of its answers (default 100; 700 on cuda)
#   EXCLUDE  folder of evaluation prompts that must stay out (default ../shared/data/eval)
#   OUT      working folder: dialogues, features, drafters, logs (default runs/smollm2)
#   EXTRA    more options of `forespeak train`, such as "--threads 1"
set -eu
cd "$(dirname "$0")/.."
if [ "${1:-}" = --device ]; then DEVICE="$2"; fi
FORESPEAK="${FORESPEAK:-${VENV:-.venv}/bin/forespeak}"
PROMPTS="${PROMPTS:-../shared/data/train_prompts}"
EXCLUDE="${EXCLUDE:-../shared/data/eval}"
OUT="${OUT:-runs/smollm2}"
DEVICE="${DEVICE:-auto}"
METHODS="${METHODS:-medusa mtp_parallel mtp eagle eagle3 dflash dspark}"
EXTRA="${EXTRA:-}"
case "$DEVICE" in
cuda*) on=gpu MOST="${MOST:-100000}" WRITTEN="${WRITTEN:-24000}" DERIVED="${DERIVED:-700}" ROWS="${ROWS:-1024}" LENGTH="${LENGTH:-256}" ;;
*) on=cpu MOST="${MOST:-700}" WRITTEN="${WRITTEN:-1300}" DERIVED="${DERIVED:-100}" ROWS="${ROWS:-48}" LENGTH="${LENGTH:-192}" ;;
esac
begun=$(date +%s)

# Minutes until a share (in percent) of LIMIT is over; empty without a limit.
until_share() {
    if [ -z "${LIMIT:-}" ]; then return; fi
    awk -v limit="$LIMIT" -v share="$1" -v gone="$(($(date +%s) - begun))" \
        'BEGIN { left = limit * share / 100 - gone / 60; print (left > 0.2 ? left : 0.2) }'
}

# The recipe's settings for one method on this kind of machine: on a GPU large batches, all places in
# the loss, and features as they are needed, which is faster there than reading them from a disk.
sets_of() {
    printf '%s' "--set schedule.follows=time"
    if [ "$on" = cpu ]; then return; fi
    printf '%s' " --set data.features=live --set batch.tokens=16384 --set schedule.epochs=100"
    case "$1" in
    dflash | dspark) printf '%s' " --set objective.num_anchors=96" ;;
    *) printf '%s' " --set objective.max_positions=8192" ;;
    esac
}

generate() {
    limit=$(until_share "$1")
    shift
    "$FORESPEAK" data generate --device "$DEVICE" --rows "$ROWS" --max-new-tokens "$LENGTH" \
        --temperature 0.8 --greedy-share 0.7 ${limit:+--time-limit "$limit"} "$@"
}

echo "== answers"
mkdir -p "$OUT/prompts"
set --
for file in "$EXCLUDE"/*.jsonl; do
    if [ -f "$file" ]; then set -- "$@" --exclude "$file"; fi
done
generate 25 --out "$OUT/self-written" --self-written "$WRITTEN" "$@"
found=no
for file in "$PROMPTS"/*.jsonl; do
    [ -f "$file" ] || continue
    step=$(awk -v most="$MOST" 'END { print int((NR + most - 1) / most) }' "$file")
    taken="$OUT/prompts/$(basename "$file")"
    awk -v step="$step" 'NR % step == 1 || step == 1' "$file" >"$taken"
    set -- "$@" --prompts "$taken"
    found=yes
done
if [ "$found" = yes ]; then generate 37 --out "$OUT/answers" "$@"; fi

# Prompts that stand on texts, of the answers that there are now.
set --
for file in "$EXCLUDE"/*.jsonl; do
    if [ -f "$file" ]; then set -- "$@" --exclude "$file"; fi
done
derived() {
    name="$1" share="$2" kinds="$3"
    shift 3
    from="$OUT/self-written"
    if [ "$name" = translated-back ]; then from="$OUT/derived"; fi
    if [ ! -f "$OUT/prompts/$name.jsonl" ]; then
        "$FORESPEAK" data derive "$from" --out "$OUT/prompts/$name.jsonl" --kinds "$kinds"
    fi
    generate "$share" --out "$OUT/$name" --prompts "$OUT/prompts/$name.jsonl" "$@"
}
derived derived 44 "summary=$((3 * DERIVED)),question=$((3 * DERIVED)),translation=$((2 * DERIVED)),rewriting=$((2 * DERIVED))" "$@"
derived translated-back 45 "back_translation=$DERIVED" "$@"

set --
for folder in answers self-written derived translated-back; do
    if [ -d "$OUT/$folder" ]; then set -- "$@" --data "$OUT/$folder"; fi
done
if [ "$on" = cpu ]; then
    echo "== features"
    recipes=""
    for method in $METHODS; do recipes="$recipes smollm2/$method"; done
    # shellcheck disable=SC2086
    "$FORESPEAK" features $recipes "$@" --out "$OUT/features" --device "$DEVICE"
    set -- "$@" --features "$OUT/features"
fi

left=$(echo "$METHODS" | wc -w)
for method in $METHODS; do
    echo "== $method"
    minutes="${MINUTES:-20}"
    if [ -n "${LIMIT:-}" ]; then
        minutes=$(awk -v left="$(until_share 97)" -v count="$left" 'BEGIN { print left / count }')
    fi
    # shellcheck disable=SC2046,SC2086
    "$FORESPEAK" train "smollm2/$method" "$@" --out "$OUT/drafters/$method" --device "$DEVICE" \
        --time-limit "$minutes" --resume $(sets_of "$method") $EXTRA
    left=$((left - 1))
done
echo "== drafters are in $OUT/drafters; compare them with"
echo "$FORESPEAK compare --drafters $OUT/drafters --prompts PROMPTS.jsonl --max-new-tokens 128"
