#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under nine minutes: tests, kernel timings, whole models, a peer.
#
#   evals/gpu/run.sh                     on a machine with a GPU; nothing is installed or downloaded
#   evals/gpu/run.sh --device cpu --tiny rehearsal: every part on tiny shapes
#
# Writes JSON and one log to $OUT, or to evals/results/gpu. Each part has a time limit of its own and writes its file
# after every row; a part that fails or is stopped does not stop the others. Exit code: number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-evals/results/gpu}
mkdir -p "$OUT"
export OUT PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/quantkit-triton}
PYTHON=${PYTHON:-python3}
LOG=$OUT/log.txt
: > "$LOG"
failed=0
started=$(date +%s)

part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 begun status
  shift 2
  if [ -n "${PARTS:-}" ] && [[ " $PARTS " != *" $name "* ]]; then return; fi
  begun=$(date +%s)
  echo "== $name (at most $limit s)" | tee -a "$LOG"
  timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$LOG" | tail -n "${TAIL:-60}"
  status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || { failed=$((failed + 1)); echo "== $name FAILED with $status" | tee -a "$LOG"; }
  echo "== $name took $(($(date +%s) - begun)) s" | tee -a "$LOG"
}

part machine 40 "$PYTHON" evals/gpu/machine.py "$@"
# Most of the tests' time is Triton's compiler, hence several processes where the plugin is there.
"$PYTHON" -c "import xdist" 2>/dev/null && workers="-n 8" || workers=""
# shellcheck disable=SC2086  # two words or none
part tests 140 "$PYTHON" -m pytest -q --maxfail=30 --tb=line -m gpu -p no:cacheprovider $workers tests/kernels/gpu
part linears 110 "$PYTHON" evals/gpu/linears.py --seconds 100 "$@"
part attention 70 "$PYTHON" evals/gpu/attention.py --seconds 60 "$@"
part end_to_end 120 "$PYTHON" evals/gpu/end_to_end.py --seconds 110 "$@"
part peer 55 "$PYTHON" evals/gpu/peer.py "$@"
echo "== all parts: $(($(date +%s) - started)) s, $failed failed" | tee -a "$LOG"
exit "$failed"
