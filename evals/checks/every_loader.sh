#!/bin/sh
# One quantization of a model in every format, loaded by the ecosystem's own loaders, against quantkit's decoding of it.
#
#   GPTQMODEL_PYTHON=... LLAMA_CPP_PYTHON=... sh every_loader.sh MODEL TEXT WORK [GROUP]
#
# MODEL: directory; TEXT: a .txt file; WORK: where to work; GROUP: group size (32). Interpreters of environments with
# GPTQModel and with llama-cpp-python; a loader without one is left out. Prints one line per comparison.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
model=$1 text=$2 work=$3 group=${4:-32}
export OMP_NUM_THREADS=1
mkdir -p "$work"
ids=$work/ids.json
python "$here/loader_logits.py" ids "$model" "$text" "$ids" 2>/dev/null

logits() { # NAME LOADER CHECKPOINT [OPTIONS]
    name=$1 loader=$2 checkpoint=$3
    shift 3
    case $loader in
    gptqmodel) run=${GPTQMODEL_PYTHON:-} ;;
    llama.cpp) run=${LLAMA_CPP_PYTHON:-} ;;
    *) run=python ;;
    esac
    [ -n "$run" ] || return 0
    "$run" "$here/loader_logits.py" run "$checkpoint" "$work/$name.npz" --ids "$ids" --with "$loader" "$@" >"$work/$name.log" 2>&1 ||
        { echo "$name: FAILED, see $work/$name.log" && return 0; }
}
compare() { # LEFT RIGHT
    [ -f "$work/$1.npz" ] && [ -f "$work/$2.npz" ] || return 0
    printf '%-28s %s\n' "$2" "$(python "$here/loader_logits.py" compare "$work/$1.npz" "$work/$2.npz")"
}
qk() { quantkit "$@" --quiet >/dev/null; }
quantize() { # NAME RECIPE OPTIONS...
    name=$1
    shift
    qk quantize "$model" -o "$work/$name" --overwrite "$@"
}

qk convert "$model" --to gguf --type f32 -o "$work/original.gguf" --overwrite
logits original transformers "$model"
logits original-gguf llama.cpp "$work/original.gguf"
compare original original-gguf

for kind in sym asym; do
    [ $kind = sym ] && symmetric=true || symmetric=false
    [ $kind = sym ] && first=gptq || first=gptq-v2
    quantize $kind-$first --recipe rtn-int4 --set weights.group_size="$group" --set weights.symmetric=$symmetric --format $first
    for to in dense compressed-tensors gptq-v2 awq; do
        [ $to = $first ] || qk convert "$work/$kind-$first" --to $to -o "$work/$kind-$to" --overwrite
    done
    qk convert "$work/$kind-$first" --to gguf -o "$work/$kind.gguf" --overwrite
    logits $kind-dense transformers "$work/$kind-dense"
    logits $kind-compressed-tensors transformers "$work/$kind-compressed-tensors"
    compare $kind-dense $kind-compressed-tensors
    logits $kind-dense-16 transformers "$work/$kind-dense" --dtype float16 --no-text
    for to in $first gptq-v2 awq; do
        logits $kind-$to gptqmodel "$work/$kind-$to" --dtype float16 --no-text
        compare $kind-dense-16 $kind-$to
    done
    logits $kind-gguf llama.cpp "$work/$kind.gguf"
    compare $kind-dense $kind-gguf
    # The same values in a float file: what is left is llama.cpp's rounding of activations to 8 bits.
    qk convert "$work/$kind-dense" --to gguf --type f32 -o "$work/$kind-values.gguf" --overwrite
    logits $kind-values-gguf llama.cpp "$work/$kind-values.gguf"
    compare $kind-dense $kind-values-gguf
done
