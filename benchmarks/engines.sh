#!/usr/bin/env bash
# Both engines on one GPU, launched as a user would: measured beside predicted, time and memory.
# Usage: engines.sh OUT [EXPERIMENT]      (EXPERIMENT: engines.yaml beside this script)
# Host memory is touched and DeepSpeed's operators are built first, then the machine is profiled and
# the experiment planned for it. ENGINES_TOUCH_GIB (112) is the memory to touch, none if 0; ENGINES_SECONDS
# (460) the time of the launches, after which the next is left out. Ends within ten minutes.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" || exit
out=$(realpath "$1")
cd "$(dirname "$0")/.." || exit
experiment=$(realpath "${2:-benchmarks/engines.yaml}")
python=${PYTHON:-python3}
export COLUMNS=160 PYTHONUNBUFFERED=1
bigplan() { "$python" -c 'from bigplan.cli import main; main()' "$@"; }
ulimit -l unlimited 2>/dev/null || echo "page-locked memory is limited to $(ulimit -l) KiB" >&2
{
  date -u +%F
  "$python" -c "import platform, torch, deepspeed, ray; print('python', platform.python_version(), 'torch', torch.__version__, 'deepspeed', deepspeed.__version__, 'ray', ray.__version__)" 2>/dev/null
  nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv 2>/dev/null
  echo "cores: $(nproc)"
} > "$out/environment.txt"
device=cpu
nvidia-smi > /dev/null 2>&1 && device=cuda
"$python" -m bigplan.runtime.deepspeed.ops cpu_adam pin_memory --device $device > "$out/operators.txt" 2>&1 &
[ "${ENGINES_TOUCH_GIB:-112}" = 0 ] || "$python" -m benchmarks.limit touch "${ENGINES_TOUCH_GIB:-112}"
wait
echo "== profile, $(date -u +%H:%M:%S)"
bigplan profile --quick --name this-machine --out "$out/cluster.yaml" > "$out/profile.txt" 2>&1 || exit
sed "s|^cluster:.*|cluster: $out/cluster.yaml|" "$experiment" > "$out/experiment.yaml"
echo "== launches, $(date -u +%H:%M:%S)"
timeout -s INT -k 20 "${ENGINES_SECONDS:-460}" "$python" -c 'from bigplan.cli import main; main()' \
  experiment run "$out/experiment.yaml" --out "$out/experiment" 2>&1 | tee "$out/log.txt"
bigplan experiment compare "$out/experiment" | tee "$out/compare.txt"
