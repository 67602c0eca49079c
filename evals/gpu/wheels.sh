#!/usr/bin/env bash
# Fetch the wheels of wheels.txt for a machine without a network into .gpu/, from where run.sh puts them on the path.
#
#   evals/gpu/wheels.sh [3.12]     for this Python, on x86-64 Linux
set -euo pipefail
cd "$(dirname "$0")/../.."
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
rm -f .gpu/*.whl
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${1:-3.12}" "${platforms[@]}" \
  --dest .gpu -r evals/gpu/wheels.txt
ls -l .gpu/*.whl
