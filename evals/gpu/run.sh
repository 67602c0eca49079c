#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under nine minutes: tests, text, kernels, whole models, peers, a page.
#
#   evals/gpu/run.sh                     on a machine with a GPU; nothing is installed or downloaded
#   evals/gpu/run.sh --device cpu --tiny rehearsal: every part on tiny shapes, kernels in Triton's interpreter
#
# Writes JSON, one log and a page to $OUT: by default evals/results/<name of the GPU>, of a rehearsal a temporary folder.
# Each part has a time limit of its own and writes its file after every row; a part that fails or is stopped does not
# stop the others. PARTS="linears peer" runs only those; REHEARSAL=8 makes all limits 8 times as long, for slow machines.
# PYTHON=.venv/bin/python says which Python has torch and triton; OUT=DIR where to write.
# Exit code: number of parts that failed; 64 if nothing could start.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
case " $* " in
  *" -h "* | *" --help "*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' evals/gpu/run.sh; exit 0 ;;
  *" --device cpu "*) needed="import torch" lacks="torch" ;;
  *) needed="import torch, triton; torch.cuda.init()" lacks="torch, triton or CUDA device" ;;
esac
if ! why=$("$PYTHON" -c "$needed" 2>&1); then
  echo "error: $PYTHON finds no $lacks (${why##*$'\n'}); set PYTHON=.venv/bin/python, or rehearse: --device cpu --tiny" >&2
  exit 64
fi
case " $* " in
  *" --device cpu "*) factor=${REHEARSAL:-4} place=${TMPDIR:-/tmp}/quantkit-rehearsal ;;
  *)
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr 'A-Z ' 'a-z-')
    factor=${REHEARSAL:-1} place=evals/results/${gpu:-gpu}
    ;;
esac
for name in ${PARTS:-}; do
  grep -Eq "(part|bench) $name [0-9]" evals/gpu/run.sh && continue
  echo "error: PARTS: there is no part '$name'; evals/gpu/README.md lists them" >&2
  exit 64
done
OUT=${OUT:-$place}
mkdir -p "$OUT"
export OUT PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/quantkit-triton}
LOG=$OUT/log.txt
: > "$LOG"
failed=0
started=$(date +%s)

part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$(($2 * factor)) begun status
  shift 2
  if [ -n "${PARTS:-}" ] && [[ " $PARTS " != *" $name "* ]]; then return; fi
  begun=$(date +%s)
  echo "== $name (at most $limit s)" | tee -a "$LOG"
  timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$LOG" | tail -n "${TAIL:-60}"
  status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || { failed=$((failed + 1)); echo "== $name FAILED with $status" | tee -a "$LOG"; }
  echo "== $name took $(($(date +%s) - begun)) s" | tee -a "$LOG"
}

bench() { # bench NAME SECONDS ARGUMENTS...: a part that stops by itself in time to write
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" "$PYTHON" "evals/gpu/$name.py" --seconds "$(((limit - 12) * factor))" "$@"
}

# The limits add up to 530 s at most; a test counts them.
part machine 20 "$PYTHON" evals/gpu/machine.py "$@"
# Most of the tests' time is Triton's compiler, hence several processes where the plugin is there.
"$PYTHON" -c "import xdist" 2>/dev/null && workers="-n 8" || workers=""
# shellcheck disable=SC2086  # two words or none
part tests 75 "$PYTHON" -m pytest -o addopts= -o required_plugins= -q --maxfail=30 --tb=line -m gpu -p no:cacheprovider $workers tests/kernels/gpu
bench linears 80 "$@"
bench experts 40 "$@"
bench attention 55 "$@"
bench end_to_end 95 "$@"
bench greedy 55 "$@"
bench peer 40 "$@"
bench quantization 40 "$@"
bench sanitizer 25 "$@"
# Takes too long to be part of the whole: only where PARTS names it.
[[ " ${PARTS:-} " != *" tune "* ]] || bench tune 60 "$@"
part page 5 "$PYTHON" evals/gpu/page.py --results "$OUT" --write "$OUT/performance.md"
echo "== all parts: $(($(date +%s) - started)) s, $failed failed" | tee -a "$LOG"
exit "$failed"
