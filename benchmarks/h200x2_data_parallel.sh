#!/usr/bin/env bash
# Two ranks on two GPUs over NCCL, gradients reduced layer by layer: the same model and global batch
# as h200_first_table.sh, GPU memory held to 16 GiB each. Usage: h200x2_data_parallel.sh OUTPUT_FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: h200x2_data_parallel.sh OUTPUT_FOLDER}
bigplan() { "${PYTHON:-python3}" -c 'from bigplan.cli import main; main()' "$@"; }
mkdir -p "$out"
run_dir=$(mktemp -d)
bigplan detect --out "$run_dir/machine.yaml"
{
  echo "command: bigplan launch launch/h200-3.3b-16gib.yaml --cluster MACHINE --set dp=2 --set zero=0 --steps 6"
  echo "date: $(date -u +%F)"
  "${PYTHON:-python3}" -c "import platform, torch, ray; print('python', platform.python_version(), 'torch', torch.__version__, 'ray', ray.__version__)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  echo "cores: $(nproc)"
} | tee "$out/environment.txt"
bigplan launch launch/h200-3.3b-16gib.yaml --cluster "$run_dir/machine.yaml" --set dp=2 --set zero=0 \
  --steps 6 --run-dir "$run_dir" 2>&1 | tee "$out/launch.txt"
run=$(ls -d "$run_dir"/*/ | head -1)
cp "$run"/metrics.jsonl "$run"/summary.json "$out"/
