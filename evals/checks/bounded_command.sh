#!/usr/bin/env bash
# Run any command in a cgroup whose memory limit kills, and print the kernel's count of its peak.
#
#   evals/checks/bounded_command.sh LIMIT_MIB COMMAND...
#
# Needs root and cgroup v2 or v1 with the memory controller. No swap is allowed inside the group.
set -euo pipefail
limit=$(($1 * 1024 * 1024))
shift
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  group=/sys/fs/cgroup/quantkit-check-$$
  mkdir "$group"
  echo "+memory" > /sys/fs/cgroup/cgroup.subtree_control 2>/dev/null || true
  echo "$limit" > "$group/memory.max"
  echo 0 > "$group/memory.swap.max" 2>/dev/null || true
else
  group=/sys/fs/cgroup/memory/quantkit-check-$$
  mkdir "$group"
  echo "$limit" > "$group/memory.limit_in_bytes"
fi
trap 'rmdir "$group" 2>/dev/null || true' EXIT
status=0
python3 - "$group" "$@" <<'PY' || status=$?
import os, resource, subprocess, sys, time

group, *command = sys.argv[1:]
join = lambda: open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
started = time.monotonic()
done = subprocess.run(command, preexec_fn=join)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(f"peak resident memory {peak:.0f} MiB, {time.monotonic() - started:.0f} s, exit code {done.returncode}")
sys.exit(done.returncode != 0)
PY
exit $status
