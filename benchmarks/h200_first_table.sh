#!/usr/bin/env bash
# Trains llama-like-3.3b with GPU memory held to 16 GiB through a local Ray, as a user would, and
# keeps the run's record: predicted beside measured. Usage: h200_first_table.sh OUTPUT_FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: h200_first_table.sh OUTPUT_FOLDER}
python=${PYTHON:-python3}
mkdir -p "$out"
{
  echo "command: bigplan launch launch/h200-3.3b-16gib.yaml --steps 8"
  echo "date: $(date -u +%F)"
  "$python" -c "import platform, torch, ray; print('python', platform.python_version(), 'torch', torch.__version__, 'ray', ray.__version__)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  echo "cores: $(nproc)"
} | tee "$out/environment.txt"
run_dir=$(mktemp -d)
"$python" -c 'from bigplan.cli import main; main()' launch launch/h200-3.3b-16gib.yaml --steps 8 \
  --run-dir "$run_dir" 2>&1 | tee "$out/launch.txt"
run=$(ls -d "$run_dir"/*/ | head -1)
"$python" -c 'from bigplan.cli import main; main()' report "$run" 2>&1 | tee "$out/report.txt"
cp "$run"/plan.yaml "$run"/metrics.jsonl "$run"/summary.json "$out"/
