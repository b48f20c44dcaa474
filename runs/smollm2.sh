#!/bin/sh
# From nothing to drafters of every method for SmolLM2-135M-Instruct: answers, features, training.
# Unattended and resumable: the same command goes on where it stopped.
#
#   runs/smollm2.sh                         all of it, 20 minutes of training a drafter
#   MINUTES=5 runs/smollm2.sh               a first pass
#   LIMIT=8 runs/smollm2.sh --device cuda   on a GPU, all of it in 8 minutes; meant for 5 to 10 million
#                                           tokens of answers. What is not done by then is saved.
#   METHODS="eagle3 dspark" runs/smollm2.sh
#
#   LIMIT    minutes for all of it; then MINUTES is each drafter's share of what is left
#   PROMPTS  folder of prompt files (default ../shared/data/train_prompts); "none" for none
#   MOST     prompts of each file at most, evenly taken (default 700; all on cuda)
#   WRITTEN  prompts that the target writes itself, besides (default 1300; 24000 on cuda; 0 for none)
#   DERIVED  tenth part of the prompts that are made of its answers (default 100; 700 on cuda; 0)
#   EXCLUDE  folder of evaluation prompts that must stay out (default ../shared/data/eval); "none"
#   OUT      working folder: dialogues, features, drafters, stamps (default runs/smollm2). What has a
#            stamp in OUT/done is not done again; remove it, or name another folder, to change that.
#   SECOND   minutes of a second pass for each drafter, from its weights of the first, with more draft
#            words and a smaller rate; into OUT/second (default none; not with LIMIT)
#   SHIP     folder that finished drafters are copied to, without logs and checkpoints of training,
#            such as checkpoints/smollm2-135m, where `--method eagle3` finds them
#   EXTRA    more options of `forespeak train`, such as "--threads 1"
set -eu
export LC_ALL=C
cd "$(dirname "$0")/.."
DEVICE="${DEVICE:-auto}"
case "${1:-}" in
--device) DEVICE="${2:?--device needs cpu, cuda or cuda:N}" ;;
--device=*) DEVICE="${1#--device=}" ;;
"") ;;
*) echo "runs/smollm2.sh takes --device NAME and nothing else; see its head." >&2 && exit 2 ;;
esac
# A GPU wants other sizes than a CPU, so it is chosen here and not by each command for itself.
if [ "$DEVICE" = auto ]; then
    DEVICE=cpu
    if nvidia-smi -L >/dev/null 2>&1; then DEVICE=cuda; fi
fi
FORESPEAK="${FORESPEAK:-${VENV:-.venv}/bin/forespeak}"
PROMPTS="${PROMPTS:-../shared/data/train_prompts}"
EXCLUDE="${EXCLUDE:-../shared/data/eval}"
OUT="${OUT:-runs/smollm2}"
METHODS="${METHODS:-medusa mtp_parallel mtp eagle eagle3 dflash dspark}"
EXTRA="${EXTRA:-}"
case "$DEVICE" in
cuda*)
    on=gpu MOST="${MOST:-100000}" WRITTEN="${WRITTEN:-24000}" DERIVED="${DERIVED:-700}"
    ROWS="${ROWS:-1024}" LENGTH="${LENGTH:-256}"
    ;;
*)
    on=cpu MOST="${MOST:-700}" WRITTEN="${WRITTEN:-1300}" DERIVED="${DERIVED:-100}"
    ROWS="${ROWS:-48}" LENGTH="${LENGTH:-192}"
    ;;
esac
refuse() {
    echo "$1" >&2
    exit 2
}

is_number() { # TEXT: whether it is a number above 0
    echo "$1" | awk '{ exit !($0 ~ /^[0-9]*\.?[0-9]+$/ && $0 > 0) }'
}

if [ -n "${LIMIT:-}" ]; then
    is_number "$LIMIT" || refuse "LIMIT is '$LIMIT'; allowed: minutes, a number above 0."
fi
if [ -n "${SHIP:-}" ] && ! { mkdir -p "$SHIP" && [ -w "$SHIP" ]; } 2>/dev/null; then
    refuse "SHIP is '$SHIP', a folder that cannot be made or written; name another one."
fi
is_number "${SECOND:-20}" || refuse "SECOND is '$SECOND'; allowed: a number above 0, or nothing."
if [ -n "${LIMIT:-}" ] && [ -n "${SECOND:-}" ]; then
    refuse "LIMIT and SECOND exclude each other: a limit is shared out by the first pass."
fi
is_number "${MINUTES:-20}" || refuse "MINUTES is '$MINUTES'; allowed: a number above 0."
case "$MOST" in "" | 0* | *[!0-9]*) refuse "MOST is '$MOST'; allowed: an integer above 0." ;; esac
for count in "$WRITTEN" "$DERIVED"; do
    case "$count" in "" | *[!0-9]*)
        refuse "WRITTEN is '$WRITTEN' and DERIVED '$DERIVED'; allowed: integers, 0 for none." ;;
    esac
done
for method in $METHODS; do
    case " medusa mtp_parallel mtp eagle eagle3 dflash dspark draft_model medusa2 " in
    *" $method "*) ;;
    *) refuse "METHODS has '$method', for which there is no recipe smollm2/$method." ;;
    esac
done
[ -n "$(echo "$METHODS" | tr -d ' ')" ] || refuse "METHODS names no method."
if [ "$PROMPTS" != none ] && [ -d "$PROMPTS" ] && ! ls "$PROMPTS"/*.jsonl >/dev/null 2>&1; then
    refuse "There is no .jsonl file in $PROMPTS; set PROMPTS to a folder of prompt files, or to none."
fi
for folder in "$PROMPTS" "$EXCLUDE"; do
    if [ "$folder" != none ] && [ ! -d "$folder" ]; then
        echo "There is no folder $folder; set PROMPTS and EXCLUDE to folders of prompt files, or to none." >&2
        exit 2
    fi
done
begun=$(date +%s)
done="$OUT/done"
mkdir -p "$OUT/prompts" "$done"
trap 'exit 130' INT
trap 'exit 143' TERM

# Minutes from now until a share (in percent) of LIMIT is over, less what a command needs to start.
minutes_until() {
    awk -v limit="$LIMIT" -v share="$1" -v gone="$(($(date +%s) - begun))" \
        'BEGIN { left = limit * share / 100 - gone / 60; print (left > 0 ? left : 0) }'
}

is_over() { # SHARE: whether so much of LIMIT is over, with ten seconds to spare
    [ -n "${LIMIT:-}" ] && [ "$(minutes_until "$1" | awk '{ print ($1 < 0.17) }')" = 1 ]
}

# generate NAME SHARE OPTIONS...: dialogues in OUT/NAME, by the time that SHARE of LIMIT is over.
generate() {
    name="$1" share="$2"
    shift 2
    if [ -e "$done/$name" ]; then return; fi
    if is_over "$share"; then
        echo "no time is left for $name"
        return
    fi
    limit=""
    if [ -n "${LIMIT:-}" ]; then limit="$(minutes_until "$share")"; fi
    if [ "$EXCLUDE" != none ]; then
        for file in "$EXCLUDE"/*.jsonl; do set -- "$@" --exclude "$file"; done
    fi
    "$FORESPEAK" data generate --out "$OUT/$name" --device "$DEVICE" --rows "$ROWS" \
        --max-new-tokens "$LENGTH" --temperature 0.8 --greedy-share 0.7 \
        ${limit:+--time-limit "$limit"} "$@"
    touch "$done/$name"
}

# derive NAME FROM KINDS: prompts of the answers in OUT/FROM.
derive() {
    if [ -e "$done/$1" ] || [ -f "$OUT/prompts/$1.jsonl" ] || [ ! -f "$OUT/$2/dialogues.jsonl" ]; then
        return
    fi
    "$FORESPEAK" data derive "$OUT/$2" --out "$OUT/prompts/$1.jsonl" --kinds "$3" ||
        echo "there are no prompts of this kind; going on without"
}

# Once training has begun the data stay as they are: a run goes on with the same only.
if [ ! -e "$done/data" ]; then
    echo "== answers"
    if [ "$WRITTEN" -gt 0 ]; then generate self-written 25 --self-written "$WRITTEN"; fi
    set --
    if [ "$PROMPTS" != none ]; then
        for file in "$PROMPTS"/*.jsonl; do
            step=$(awk -v most="$MOST" 'END { print int((NR + most - 1) / most) }' "$file")
            taken="$OUT/prompts/$(basename "$file")"
            awk -v step="$step" 'NR % step == 1 || step == 1' "$file" >"$taken"
            set -- "$@" --prompts "$taken"
        done
    fi
    if [ $# -gt 0 ]; then generate answers 37 "$@"; fi
    if [ "$DERIVED" -gt 0 ]; then
        from=self-written
        if [ "$WRITTEN" -eq 0 ]; then from=answers; fi
        three=$((3 * DERIVED)) two=$((2 * DERIVED))
        derive about-texts $from "summary=$three,question=$three,translation=$two,rewriting=$two"
        if [ -f "$OUT/prompts/about-texts.jsonl" ]; then
            generate derived 44 --prompts "$OUT/prompts/about-texts.jsonl"
        fi
        derive foreign derived "back_translation=$DERIVED"
        if [ -f "$OUT/prompts/foreign.jsonl" ]; then
            generate translated-back 46 --prompts "$OUT/prompts/foreign.jsonl"
        fi
    fi
fi

set --
for folder in answers self-written derived translated-back; do
    if [ -f "$OUT/$folder/manifest.json" ]; then set -- "$@" --data "$OUT/$folder"; fi
done
if [ $# -eq 0 ]; then
    echo "There are no answers to train on; the same command with more time goes on with them." >&2
    exit 1
fi
touch "$done/data"

if [ "$on" = cpu ]; then
    echo "== features"
    recipes=""
    for method in $METHODS; do recipes="$recipes smollm2/$method"; done
    # shellcheck disable=SC2086
    "$FORESPEAK" features $recipes "$@" --out "$OUT/features" --device "$DEVICE"
    set -- "$@" --features "$OUT/features"
fi

# The recipe's settings for one method on this kind of machine: on a GPU large batches, all places in
# the loss, and features as they are needed.
sets_of() {
    printf '%s' "--set schedule.follows=time"
    if [ "$on" = cpu ]; then return; fi
    printf '%s' " --set data.features=live --set batch.tokens=16384 --set schedule.epochs=12"
    case "$1" in
    dflash | dspark) printf '%s' " --set objective.num_anchors=96" ;;
    *) printf '%s' " --set objective.max_positions=8192" ;;
    esac
}

# ship METHOD: a finished drafter goes to SHIP, in the place of an older one.
ship() {
    from="$OUT/second/$1"
    if [ ! -e "$done/second-$1" ]; then from="$OUT/drafters/$1"; fi
    if [ -z "${SHIP:-}" ]; then return; fi
    rm -rf "$SHIP/.part-$1"
    mkdir -p "$SHIP/.part-$1"
    for file in "$from"/*; do
        case "${file##*/}" in log.*) continue ;; esac
        if [ -f "$file" ]; then cp "$file" "$SHIP/.part-$1/"; fi
    done
    chmod 644 "$SHIP/.part-$1"/*
    rm -rf "${SHIP:?}/$1"
    mv "$SHIP/.part-$1" "$SHIP/$1"
}

# train_one METHOD MINUTES FOLDER OPTIONS...: whether a drafter is in FOLDER at the end.
train_one() {
    method="$1" minutes="$2" folder="$3" code=0
    shift 3
    echo "== $method, $minutes minutes, to $folder"
    # shellcheck disable=SC2046,SC2086
    "$FORESPEAK" train "smollm2/$method" "$@" --out "$folder" --device "$DEVICE" \
        --time-limit "$minutes" --resume $(sets_of "$method") $EXTRA || code=$?
    if [ "$code" = 130 ]; then exit 130; fi # stopped by hand
    [ "$code" = 0 ] && [ -f "$folder/config.json" ]
}

missing="" unfinished=""
left=$(echo "$METHODS" | wc -w)
for method in $METHODS; do
    count=$left
    left=$((left - 1))
    if [ ! -e "$done/train-$method" ]; then
        minutes="${MINUTES:-20}"
        if [ -n "${LIMIT:-}" ]; then
            # A tenth of a minute of each share goes to the start of the command and to the export.
            minutes=$(minutes_until 98 | awk -v count="$count" '{ print $1 / count - 0.1 }')
            if [ "$(echo "$minutes" | awk '{ print ($1 < 0.1) }')" = 1 ]; then
                missing="$missing $method"
                continue
            fi
        fi
        if ! train_one "$method" "$minutes" "$OUT/drafters/$method" "$@"; then
            missing="$missing $method"
            continue
        fi
        rm -f "$done/second-$method" # of older weights
        touch "$done/train-$method"
    fi
    # draft_model and medusa2 are models of their own, which nothing starts from.
    case "${SECOND:+$method}" in
    "" | draft_model | medusa2) ;;
    *)
        if [ -e "$done/second-$method" ]; then
            :
        elif train_one "$method" "$SECOND" "$OUT/second/$method" "$@" \
            --start-from "$OUT/drafters/$method" --draft-vocab-size 10240 \
            --set optimizer.learning_rate=2e-3; then
            touch "$done/second-$method"
        else
            unfinished="$unfinished $method"
        fi
        ;;
    esac
    ship "$method"
done
echo "== drafters are in $OUT/drafters; compare them with"
echo "$FORESPEAK compare --drafters $OUT/drafters --prompts PROMPTS.jsonl --max-new-tokens 128"
if [ -n "${SECOND:-}" ]; then echo "Those of the second pass are in $OUT/second."; fi
if [ -n "$missing" ]; then
    echo "There is none of:$missing; the same command goes on with them." >&2
fi
if [ -n "$unfinished" ]; then
    echo "The second pass is missing of:$unfinished; the same command goes on with it." >&2
fi
if [ -n "$missing$unfinished" ]; then exit 1; fi
