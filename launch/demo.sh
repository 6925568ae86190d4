#!/usr/bin/env bash
# make demo: two plans without a GPU, then a small model trained on this machine as planned, and
# continued with other splits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

busy=$(python -c 'import os; print(f"{os.getloadavg()[0]:.1f} of {len(os.sched_getaffinity(0))}")')
say() { printf '\n== %s\n' "$*"; }

say "1/6  Plan Llama 3 70B on four DGX H100 nodes (no GPU needed)"
bigplan plan launch/llama-3-70b-dgx-h100.yaml

say "2/6  Plan a Hugging Face config.json on a workstation with one RTX 4090"
bigplan plan --model launch/hf-config/config.json --cluster rtx-4090-workstation

say "3/6  Describe this machine, its cores as two devices"
mkdir -p runs
bigplan detect --cpu-devices 2 --folder runs --out runs/this-machine.yaml

say "4/6  Train a small model here: two workers on a local Ray, tensors in host memory and on disk"
echo "A CPU stands in for the GPU: copies, drive and Ray take turns with compute on the same cores. Steps take"
echo "longer than predicted by as much as other programs hold these: $busy were busy before this demo began."
bigplan launch launch/demo.yaml

more=(--cap gpu=40MiB --cap host=200MiB)
say "5/6  Go on from what its workers shared out, with more memory and each layer split over both"
run=$(ls -dt runs/tiny-llama-demo-* | head -1)
bigplan launch launch/demo.yaml --resume "$run" --steps 24 "${more[@]}" --set zero=0 --set tp=2

say "6/6  Go on from there, as a pipeline of both"
bigplan launch launch/demo.yaml --resume "$run" --steps 28 "${more[@]}" --set zero=0 --set pp=2
