#!/usr/bin/env bash
# Profiles this machine as a user would, with a drive, then plans a model with the figures measured and
# with those shipped. Usage: profile_h200.sh OUTPUT_FOLDER [DRIVE_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: profile_h200.sh OUTPUT_FOLDER [DRIVE_FOLDER]}
python=${PYTHON:-python3}
bigplan() { "$python" -c 'from bigplan.cli import main; main()' "$@"; }
export COLUMNS=200
mkdir -p "$out"
if [ $# -gt 1 ]; then
  drive=$2
else
  drive=$(mktemp -d)
  trap 'rm -rf "$drive"' EXIT
fi
{
  echo "command: bigplan profile --quick --nvme DRIVE --name h200-1x-profiled"
  echo "date: $(date -u +%F)"
  "$python" -c "import platform, torch; print('python', platform.python_version(), 'torch', torch.__version__)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,utilization.gpu --format=csv,noheader
  nvidia-smi --query-gpu=clocks.max.sm,power.limit,temperature.gpu --format=csv
  echo "cores: $(nproc), load: $(cut -d' ' -f1-3 /proc/loadavg)"
} | tee "$out/environment.txt"
start=$(date +%s)
bigplan profile --quick --nvme "$drive" --name h200-1x-profiled --out "$out/cluster.yaml" 2>&1 | tee "$out/profile.txt"
echo "wall: $(($(date +%s) - start)) s" | tee -a "$out/profile.txt"
"$python" - "$out/cluster.yaml" <<'PYTHON' | tee -a "$out/profile.txt"
import sys
from bigplan.spec.catalog import find_cluster
for name, how in find_cluster(sys.argv[1]).group.gpu.sources.items():
    if "load" in how:
        print(f"{name}: {how}")
PYTHON
for cluster in "$out/cluster.yaml" h200-1x; do
  echo "== $cluster"
  bigplan plan --model llama-like-3.3b --cluster "$cluster" --cap gpu=16GiB --seq-len 4096 \
    --global-batch 16 --engine native --no-what-if
done 2>&1 | tee "$out/plans.txt"
