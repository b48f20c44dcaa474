#!/bin/sh
# Every exactness test whole, not the share that `make test` takes; the log goes to docs/.
#
#   scripts/exactness.sh            all of them, about an hour on one core
#   scripts/exactness.sh -k four    more words go to pytest
#   LOG=other.log scripts/exactness.sh ...  another log
set -eu
cd "$(dirname "$0")/.."
BIN="${VENV:-.venv}/bin"
LOG="${LOG:-docs/exactness.log}"
NEW="$LOG.new"
trap 'rm -f "$NEW" "$NEW.status"' EXIT

{
    echo "commit $(git rev-parse --short HEAD)$(git diff --quiet HEAD -- src tests || echo ' with changes')"
    echo "$("$BIN/python" -V), torch $("$BIN/python" -c 'import torch; print(torch.__version__)')"
    date -u '+started %Y-%m-%d %H:%M UTC'
    status=0
    FORESPEAK_EXHAUSTIVE=1 OMP_NUM_THREADS=1 "$BIN/python" -m pytest tests/spec tests/engine \
        --timeout=0 --durations=5 "$@" || status=$?
    echo "$status" >"$NEW.status"
} 2>&1 | tee "$NEW"

status="$(cat "$NEW.status")"
# A folder of reference data is named in skip reasons: keep this machine's paths out of the log.
sed "s|$(pwd)/||g; s|$(dirname "$(pwd)")/|../|g" "$NEW" >"$LOG"
exit "$status"
