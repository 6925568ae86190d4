#!/usr/bin/env bash
# make demo: two plans without a GPU, then a small model trained on this machine as planned.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

say "1/4  Plan Llama 3 70B on four DGX H100 nodes (no GPU needed, about half a minute)"
bigplan plan launch/llama-3-70b-dgx-h100.yaml

say "2/4  Plan a Hugging Face config.json on a workstation with one RTX 4090"
bigplan plan --model launch/hf-config/config.json --cluster rtx-4090-workstation

say "3/4  Describe this machine, its cores as two devices"
mkdir -p runs
bigplan detect --cpu-devices 2 --folder runs --out runs/this-machine.yaml

say "4/4  Train a small model here: two workers on a local Ray, tensors in host memory and on disk"
bigplan launch launch/demo.yaml
