#!/usr/bin/env bash
# Trains a model on one long sequence that all GPUs of this machine share, measured beside predicted.
# Usage: context.sh [--tiny] OUT [SETTINGS...]
# SETTINGS are the decisions of a run, such as "cp=2 zero=3" or "tp=2"; by default cp is the number of
# GPUs. One run of 1B with 131,072 tokens takes about a minute and a half on two H100s by estimate:
# 30 s until ranks run, and steps of 5 s. CONTEXT_MODEL (llama-3.2-1b), CONTEXT_LENGTH (131072) and
# CONTEXT_STEPS (4) change it; llama-3.1-8b takes 19 s a step. Rates are those of the shipped GPU, or
# of a profile, CONTEXT_CLUSTER. The first loss of every run is of the same weights and tokens, so
# runs of several settings must agree in it. OUT gets log.txt, and each run's plan, metrics and
# summary. --tiny runs a small model on CONTEXT_CPUS (2) CPU processes, to see that everything runs;
# its figures mean nothing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
tiny=''
[ "${1:-}" != --tiny ] || { tiny=1; shift; }
[ $# -ge 1 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" || exit
out=$(realpath "$1")
shift
python=${PYTHON:-python3}
model=${CONTEXT_MODEL:-llama-3.2-1b} length=${CONTEXT_LENGTH:-131072} steps=${CONTEXT_STEPS:-4}
cpus=${CONTEXT_CPUS:-2} options=()
export COLUMNS=160 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$tiny" ]; then
  model=tiny-llama-demo length=256 options=(--precision fp32)
fi

bigplan() { "$python" -c 'from bigplan.cli import main; main()' "$@"; }
described() { # this machine: its GPUs by name, with the rates that ship for them
  if [ -n "${CONTEXT_CLUSTER:-}" ]; then
    cp "$CONTEXT_CLUSTER" "$out/cluster.yaml"
  elif [ -n "$tiny" ]; then
    bigplan detect --cpu-devices "$cpus" --folder "$out" --out "$out/cluster.yaml"
  else
    bigplan detect --folder "$out" --out "$out/cluster.yaml"
  fi
}
trained() { # SETTINGS in one word
  local setting pins=() name=${1// /-}
  for setting in $1; do pins+=(--set "$setting"); done
  echo "== $1"
  bigplan launch --model "$model" --cluster "$out/cluster.yaml" --seq-len "$length" --global-batch 1 \
    --engine native --steps "$steps" --checkpoint-keep 0 --run-dir "$out/runs-$name" "${options[@]}" "${pins[@]}"
}
main() {
  local began=$SECONDS settings=("$@") devices=$cpus
  if [ -z "$tiny" ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    devices=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  fi
  "$python" -c "import torch; print('torch', torch.__version__)"
  described || return
  [ ${#settings[@]} -gt 0 ] || settings=("cp=$devices")
  for setting in "${settings[@]}"; do
    trained "$setting" || echo "== $setting: FAILED"
  done
  echo "all: $((SECONDS - began)) s"
}
main "$@" 2>&1 | tee "$out/log.txt"
