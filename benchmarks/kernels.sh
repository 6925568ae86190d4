#!/usr/bin/env bash
# Generated kernels on one GPU: predicted, measured, the byte limit and every baseline.
# Usage: kernels.sh OUT [PART...]
#   tests           tests/kernels on the GPU, among them those of generated kernels
#   norms           norms forward beside eager, torch.compile (default, max-autotune), Liger, QuACK
#   norms-back      their backwards, 64 to 16,384 columns
#   pointwise       activations, rotary positions, softmax forward
#   pointwise-back  their backwards
#   sweep-norms     every tile of the norms' kernels beside the model's first pick
#   sweep-pointwise the same of the others
#   boundaries      kernels as one and as two, in blocks of five families and with convolutions
#   workloads       a GPT-2 block and a convolutional block: time forward and backward, memory kept
#   library         the same of blocks of Hugging Face transformers, where it is installed
#   loss            linear + cross-entropy in chunks, generated and by hand, beside its products
#   adamw           AdamW on resident state beside torch's fused one
# Without parts: all. Each ends within ten minutes (a part stops at nine and records what it left
# out), so that machines lent for ten minutes a call can run one part a call. Files: OUT/PART.txt
# as printed, OUT/PART.jsonl with every measurement, OUT/environment.txt. KERNELS_REHEARSE=1 runs
# the same on tiny sizes, anywhere: its times mean nothing.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,20s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" || exit
out=$(realpath "$1")
shift
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
rehearse=()
if [ -n "${KERNELS_REHEARSE:-}" ]; then
  rehearse=(--rehearse)
  export TRITON_INTERPRET=1
fi
export COLUMNS=180 PYTHONUNBUFFERED=1
[ $# -ge 1 ] || set -- tests norms norms-back pointwise pointwise-back sweep-norms sweep-pointwise \
  boundaries workloads library loss adamw
expected() {
  cat <<'TEXT'
Expected, written before anything ran:
norms       >= 90% of the copy's rate where 200 MB or more move; none more than 3% slower than
            torch.compile; geometric mean >= 1.05x where torch.compile is below 95%
norms-back  >= 80% of the byte limit, >= 1.3x torch.compile where it leaves two reductions unfused
pointwise   >= 90% of the copy's rate, both ways; none more than 3% slower than torch.compile
sweeps      the first pick reaches >= 95% of the best tile (geometric mean), >= 85% at worst
predicted   median error <= 10%; not known before: the model's two constants come from nine
            kernels written by hand
boundaries  >= 90% of the choices to fuse or not are the faster way
workloads   >= 1.2x eager, no slower than torch.compile, less memory kept than either for GPT-2;
            the convolutional block keeps convolutions in the layout that it is given
library     nobody had run them: no slower than torch.compile, less memory kept; >= 1.2x eager where
            activations and norms are written as several operators (GPT-2's GELU, Llama's norms)
loss        <= 1.08 times its products alone, <= 1.5 GiB beside the sum, the same bits twice; the
            generated kernel no slower than the one written by hand
adamw       30 and 28 bytes a parameter at the copy's rate; torch's 38 and 44 (a cast before)
TEXT
}
{
  "$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: a rehearsal")
import triton; print("torch", torch.__version__, "triton", triton.__version__)'
  "$python" -m pip list 2>/dev/null | grep -i -E '^(liger|quack)' || echo "neither Liger nor QuACK"
  nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.limit,driver_version --format=csv 2>/dev/null
  expected
} > "$out/environment.txt" 2>&1
failed=0
for part in "$@"; do
  echo "== $part, $(date -u +%H:%M:%S)"
  case $part in
    tests) "$python" -m pytest -q tests/kernels > "$out/tests.txt" 2>&1 ;;
    *)
      rm -f "$out/$part.jsonl"
      "$python" -c 'import sys; from bigplan.cli import main; sys.argv[0] = "bigplan"; main()' \
        kernels bench --part "$part" --out "$out/$part.jsonl" "${rehearse[@]}" \
        > "$out/$part.txt" 2>&1 ;;
  esac || { echo "$part failed: $(tail -1 "$out/$part.txt")"; failed=1; }
done
exit $failed
