#!/usr/bin/env bash
# Everything that needs a GPU, in calls of 480 s each that take up what the last one left.
#
#   evals/gpu/run.sh               the parts of parts.txt, in that order, as far as they are not done yet
#   evals/gpu/run.sh PART...       these, also what failed in them before
#   evals/gpu/run.sh --rehearse    on the CPU: tiny shapes, kernels in Triton's interpreter; also with PART
#
# PYTHON is one with torch, triton, transformers, safetensors and numpy; what else is imported comes as wheels in .gpu/,
# fetched by wheels.sh. BUDGET is the seconds of a call, 480 if not said. $WORK/results/<name of the GPU>/ has a JSON
# and a log of each part, written with every row, and performance.md; $OUT has them as results.tar.gz, rewritten all the
# time, and in the end Triton's compiled kernels. Put into .gpu/, a call takes them up, on another machine too; without
# them, and without $WORK, it begins anew. A part that dies or is stopped costs what it was at. Exit code: parts that
# are not well done.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
here=evals/gpu PYTHON=${PYTHON:-python3} WORK=${WORK:-/tmp/quantkit-gpu} carried=${CARRIED:-.gpu}
flags=() names=() factor=1 needed="import torch, triton; torch.cuda.init()"
for word in "$@"; do
  case $word in
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$here/run.sh"; exit 0 ;;
    --short) ;; # what older calls say: there was a longer list
    --rehearse) flags=(--device cpu --tiny) factor=${REHEARSAL:-8} gpu=rehearsal needed="import torch, triton" ;;
    *) names+=("$word") ;;
  esac
done
PARTS=${PARTS:-$here/parts.txt}
mapfile -t parts < <(grep -v '^#' "$PARTS")
for name in "${names[@]}"; do
  [[ $'\n'$(printf '%s\n' "${parts[@]}") = *$'\n'"$name "* ]] && continue
  echo "error: there is no part '$name'; $PARTS lists them" >&2
  exit 64
done
if ! why=$("$PYTHON" -c "$needed" 2>&1); then
  echo "error: $PYTHON: ${why##*$'\n'}; set PYTHON=.venv/bin/python, or rehearse on the CPU: --rehearse" >&2
  exit 64
fi
gpu=${gpu:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr 'A-Z ' 'a-z-')}
export RESULTS=$WORK/results/${gpu:-gpu} OUT=${OUT:-$WORK} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/quantkit-triton}
export QUANTKIT_TRITON=force TRITON_STORE_BINARY_ONLY=1 # what else Triton keeps of a kernel is ten times as large
export PYTHONPATH=$PWD:$WORK/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
budget=$(((${BUDGET:-480} - 20) * factor)) least=$((15 * factor)) tidy=$((10 * factor))
[ ${#names[@]} = 0 ] || export RETRY=1
"$PYTHON" "$here/results.py" unpack "$carried"
mkdir -p "$RESULTS"
mine=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') wheels=()
for wheel in "$carried"/*.whl; do
  [ -e "$wheel" ] || continue
  case $wheel in
    *-none-any.whl | *-abi3-* | *"-$mine-"*) wheels+=("$wheel") ;;
    *) wheels=() && echo "== no wheel is used: ${wheel##*/} is not for $mine" && break ;; # they are of one piece
  esac
done
for wheel in "${wheels[@]}"; do "$PYTHON" -m zipfile -e "$wheel" "$WORK/site"; done
trap '"$PYTHON" "$here/page.py" --results "$RESULTS" --write "$RESULTS/performance.md"; "$PYTHON" "$here/results.py" pack' EXIT

state() { grep -s "^$1 " "$RESULTS/state" | tail -n 1 | cut -d' ' -f2; }

part() { # part NAME SECONDS PROGRAM ARGUMENTS...: in as many processes as it takes
  local name=$1 end=$((SECONDS + $2 * factor)) log=$RESULTS/$1.log limit begun lines pid code again=0
  shift 2
  while [ "$again" = 0 ]; do
    begun=$SECONDS limit=$(((end < budget ? end : budget) - SECONDS))
    [ "$limit" -gt "$least" ] || return
    echo "== $name: at most $limit s" | tee -a "$log"
    lines=$(wc -l <"$log")
    timeout -k 5 $((limit - 5)) "$PYTHON" "$here/$1" "${@:2}" --seconds $((limit - tidy)) "${flags[@]}" >>"$log" 2>&1 &
    pid=$!
    wait "$pid"
    code=$?
    kill -KILL -- "-$pid" 2>/dev/null # what it has begun and left
    tail -n "+$((lines + 1))" "$log" | tail -n "${TAIL:-12}" | cut -c -240
    "$PYTHON" "$here/results.py" close "$name" "$code" $((SECONDS - begun))
    again=$?
  done
}

is_meant() { [[ ${#names[@]} = 0 || " ${names[*]} " = *" $1 "* ]]; }

# What no call has begun comes before what one has not finished.
for turn in "" unfinished; do
  for line in "${parts[@]}"; do
    read -r name seconds command <<<"$line"
    is_meant "$name" || continue
    # shellcheck disable=SC2086  # a program and its arguments
    if [[ $(state "$name") = "$turn" || (-z $turn && ${#names[@]} != 0) ]]; then part "$name" "$seconds" $command; fi
  done
done
failed=0
for line in "${parts[@]}"; do
  name=${line%% *}
  if is_meant "$name" && [ "$(state "$name")" != done ]; then
    failed=$((failed + 1))
    ended=$(state "$name")
    echo "== $name: ${ended:-not begun}"
  fi
done
echo "== $SECONDS s, $failed parts not done, or with errors"
exit "$failed"
