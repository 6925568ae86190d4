#!/usr/bin/env bash
# Adapters on experts that are spread over two GPUs, and Muon beside tensor parallelism: launches
# beside their promises, each after one that computes the same another way (first losses agree).
#
#   benchmarks/spread_adapters.sh OUT
#
# Needs two GPUs, some four minutes. OUT gets cluster.yaml (this machine's rates), a log and a
# record a launch.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python}
bigplan() { "$python" -c 'from bigplan.cli import main; main()' "$@"; }
limit() { timeout -k 10 100 "$python" -c 'from bigplan.cli import main; main()' "$@"; }

cat > "$out/qwen3-like-4b.yaml" <<'Y'
name: qwen3-like-4b
source: Qwen3-30B-A3B's block with half of its experts, made up for this measurement
layers: 12
hidden: 2048
ffn: 768
heads: 32
kv_heads: 4
head_dim: 128
qk_norm: true
experts: 64
experts_per_token: 8
router_loss: 0.001
vocab: 32000
max_sequence_length: 4096
Y
[ -e "$out/cluster.yaml" ] || bigplan profile --quick --out "$out/cluster.yaml" > "$out/profile.log" 2>&1

launch() { # name, then what the launch has
  local name=$1
  shift
  echo "== $name: $*"
  limit launch --cluster "$out/cluster.yaml" --steps 6 --checkpoint-keep 0 --run-dir "$out/$name" "$@" \
    > "$out/$name.log" 2>&1 || echo "ended with $?"
  grep -E "^step|median|GPU per|cannot|error|bigplan:" "$out/$name.log" || tail -5 "$out/$name.log"
}

mixture=(--model "$out/qwen3-like-4b.yaml" --seq-len 2048 --global-batch 32)
adapters=(--lora-rank 16 --lora-targets q_proj,v_proj,experts.gate_proj,experts.up_proj,experts.down_proj)
launch adapters-ep1 "${mixture[@]}" "${adapters[@]}" --set dp=2 --set zero=0 --set ep=1
launch adapters-ep2 "${mixture[@]}" "${adapters[@]}" --set dp=2 --set zero=0 --set ep=2
dense=(--model llama-like-3.3b --seq-len 4096 --global-batch 16 --optimizer muon)
launch muon-dp2 "${dense[@]}" --set dp=2 --set zero=1
launch muon-tp2 "${dense[@]}" --set tp=2
