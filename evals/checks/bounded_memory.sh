#!/usr/bin/env bash
# Compress a model in a cgroup whose memory limit kills, and compare the tool's own peak with the kernel's.
#
#   evals/checks/bounded_memory.sh MODEL LIMIT_MIB RECIPE [quantkit quantize options...]
#
# Needs root and cgroup v2 or v1 with the memory controller. No swap is allowed inside the group.
set -euo pipefail

model=$1 limit_mib=$2 recipe=$3
shift 3
quantkit=${QUANTKIT:-quantkit}
out=$(mktemp -d)
limit=$((limit_mib * 1024 * 1024))

if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  group=/sys/fs/cgroup/quantkit-check-$$
  mkdir "$group"
  echo "+memory" > /sys/fs/cgroup/cgroup.subtree_control 2>/dev/null || true
  echo "$limit" > "$group/memory.max"
  echo 0 > "$group/memory.swap.max" 2>/dev/null || true
  peak=$group/memory.peak
else
  group=/sys/fs/cgroup/memory/quantkit-check-$$
  mkdir "$group"
  echo "$limit" > "$group/memory.limit_in_bytes"
  peak=$group/memory.max_usage_in_bytes
fi
trap 'rm -rf "$out"; rmdir "$group" 2>/dev/null || true' EXIT

status=0
python3 - "$group" "$out" "$quantkit" "$model" "$recipe" "$@" <<'PY' || status=$?
import json, os, resource, subprocess, sys

group, out, quantkit, model, recipe, *options = sys.argv[1:]
command = [quantkit, "quantize", model, "--recipe", recipe, "-o", f"{out}/out", "--json", *options]
join = lambda: open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
done = subprocess.run(command, preexec_fn=join, stdout=subprocess.PIPE, text=True)
if done.returncode:
    sys.exit(f"exit code {done.returncode} (-9: killed for memory)")
result = json.loads(done.stdout)
kernel = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
own, mib = result["peak_bytes"], 1 << 20
print(f"{recipe}: layers {result['num_layers']}, bits per weight {result['bits_per_weight']:.3f}")
print(f"peak resident memory: tool {own / mib:.0f} MiB, kernel {kernel / mib:.0f} MiB, differ {abs(own - kernel) / kernel:.2%}")
print("seconds:", {name: round(value, 1) for name, value in result["seconds"].items()})
sys.exit(0 if abs(own - kernel) <= 0.05 * kernel else "the two differ by more than 5 %")
PY
echo "limit $limit_mib MiB; cgroup peak with page cache $(($(cat "$peak") / 1024 / 1024)) MiB; exit code $status"
exit $status
