#!/bin/sh
# From nothing to drafters of every method for SmolLM2-135M-Instruct: answers, features, training.
# Unattended and resumable: the same command goes on where it stopped.
#
#   runs/smollm2.sh                         all of it, 20 minutes of training a drafter
#   MINUTES=5 runs/smollm2.sh               a first pass
#   DEVICE=cuda MINUTES=1 runs/smollm2.sh   on a GPU
#   METHODS="eagle3 dspark" runs/smollm2.sh
#
#   PROMPTS  folder of prompt files (default ../shared/data/train_prompts)
#   WRITTEN  prompts that the target writes itself, besides (default 1300)
#   MOST     prompts of each file at most, evenly taken (default 700)
#   EXCLUDE  folder of evaluation prompts that must stay out (default ../shared/data/eval)
#   OUT      working folder: dialogues, features, drafters, logs (default runs/smollm2)
set -eu
cd "$(dirname "$0")/.."
FORESPEAK="${FORESPEAK:-${VENV:-.venv}/bin/forespeak}"
PROMPTS="${PROMPTS:-../shared/data/train_prompts}"
EXCLUDE="${EXCLUDE:-../shared/data/eval}"
OUT="${OUT:-runs/smollm2}"
DEVICE="${DEVICE:-auto}"
MINUTES="${MINUTES:-20}"
WRITTEN="${WRITTEN:-1300}"
MOST="${MOST:-700}"
ROWS="${ROWS:-48}"
LENGTH="${LENGTH:-192}"
METHODS="${METHODS:-medusa mtp_parallel mtp eagle eagle3 dflash dspark}"
mkdir -p "$OUT/prompts"

echo "== answers"
set --
for file in "$EXCLUDE"/*.jsonl; do
    if [ -f "$file" ]; then set -- "$@" --exclude "$file"; fi
done
found=no
for file in "$PROMPTS"/*.jsonl; do
    [ -f "$file" ] || continue
    step=$(awk -v most="$MOST" 'END { print int((NR + most - 1) / most) }' "$file")
    taken="$OUT/prompts/$(basename "$file")"
    awk -v step="$step" 'NR % step == 1 || step == 1' "$file" >"$taken"
    set -- "$@" --prompts "$taken"
    found=yes
done
generate() {
    "$FORESPEAK" data generate --device "$DEVICE" --rows "$ROWS" --max-new-tokens "$LENGTH" \
        --temperature 0.8 --greedy-share 0.7 "$@"
}
if [ "$found" = yes ]; then generate --out "$OUT/answers" "$@"; fi
set --
for file in "$EXCLUDE"/*.jsonl; do
    if [ -f "$file" ]; then set -- "$@" --exclude "$file"; fi
done
generate --out "$OUT/self-written" --self-written "$WRITTEN" "$@"

set --
for folder in answers self-written; do
    if [ -d "$OUT/$folder" ]; then set -- "$@" --data "$OUT/$folder"; fi
done

echo "== features"
recipes=""
for method in $METHODS; do recipes="$recipes smollm2/$method"; done
# shellcheck disable=SC2086
"$FORESPEAK" features $recipes "$@" --out "$OUT/features" --device "$DEVICE"

for method in $METHODS; do
    echo "== $method"
    "$FORESPEAK" train "smollm2/$method" "$@" --features "$OUT/features" \
        --out "$OUT/drafters/$method" --device "$DEVICE" --time-limit "$MINUTES" --resume \
        --set schedule.follows=time
done
echo "== drafters are in $OUT/drafters; compare them with"
echo "$FORESPEAK compare --drafters $OUT/drafters --prompts PROMPTS.jsonl --max-new-tokens 128"
