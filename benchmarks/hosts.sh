#!/usr/bin/env bash
# Measures one machine with several GPUs in parts, one after the other, within one time.
# Usage: hosts.sh [--dry] [--tiny] OUT PART...
#   rates     bigplan profile with collectives, and copies and CPU updates of all GPUs at once
#   predict   plans of all cases with that profile, and what they promise
#   waits     what a receive or gather that waits takes from products, by settings of NCCL and CUDA
#   soak      three communicators from four threads, for as long as the call's time allows; another
#             call goes on counting
#   equality  tests of layouts on GPUs of their own over NCCL, those of checkpoints, and loss curves
#   faults    kill -9 of a rank, and of a launch: seconds until it trains again; then at random moments,
#             whether resumed runs have the bits of one that nothing happened to
#   speed8b, small, speed29b, speed32b, speed70b, whole70b, long   cases of hosts/cases.yaml, each with its peers after it
#   table     what was promised, measured and reached by peers, so far
# Parts with cases profile and predict first if nobody has; the first with DeepSpeed compiles. Calls
# of ten minutes: "rates predict waits", "equality", "soak", "faults", "speed8b table" until nothing
# is left, and so on: what has run is not run again, and what ran out of time or memory is. HOSTS_WORK
# (/tmp/hosts) keeps everything from one call to the next; OUT gets at most eight files: log.txt and,
# after every part, hosts.tgz with all of it and the files to look at first. HOSTS_MINUTES (9.2) is
# the time of the call: what would begin after it does not. --tiny runs small models on HOSTS_CPUS (2)
# CPU processes over gloo, to see that everything runs; its figures mean nothing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
dry='' tiny=''
while :; do
  case ${1:-} in
    --dry) dry=1 ;;
    --tiny) tiny=1 ;;
    *) break ;;
  esac
  shift
done
[ $# -ge 2 ] || { sed -n '2,21s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" || exit
out=$(realpath "$1")
shift
python=${PYTHON:-python3}
work=${HOSTS_WORK:-/tmp/hosts}
minutes=${HOSTS_MINUTES:-9.2}
end=$((SECONDS + $(awk "BEGIN {print int(60 * $minutes)}")))
least=30 # seconds in which nothing worth having can be done
devices=()
profiled='' predicted=''
export COLUMNS=200 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset PYTHONDONTWRITEBYTECODE # else each process compiles all modules again, for seconds
export HOSTS_CLUSTER=$work/cluster.yaml HOSTS_SCRATCH=$work-drive HOSTS_STEPS=${HOSTS_STEPS:-4} LIMIT_TRACE=${LIMIT_TRACE-1}
if [ -n "$tiny" ]; then
  devices=(--cpu-devices "${HOSTS_CPUS:-2}")
  export HOSTS_TINY=1
fi

left() { echo $((end - SECONDS)); }
left_minutes() { awk "BEGIN {print $(left) / 60}"; }
go() { # a command, or in a dry run what it would be
  echo "+ $*"
  [ -n "$dry" ] || "$@"
}
limited() { # SECONDS COMMAND...: interrupted after its time or the call's, so that it can still tell
  local seconds=$1
  shift
  [ "$seconds" -le "$(left)" ] || seconds=$(left)
  go timeout -s INT -k 15 "$seconds" "$@"
}
bigplan() { "$python" -c 'from bigplan.cli import main; main()' "$@"; }
hosts() { go "$python" -m benchmarks.hosts "$@"; }
measured() { limited "$1" "$python" -m benchmarks.hosts_rates "${@:2}" "${devices[@]}"; }

environment() {
  date -u +%F
  "$python" -c "import platform, torch; print('python', platform.python_version(), 'torch', torch.__version__, 'NCCL', torch.cuda.nccl.version() if torch.cuda.is_available() else 'none')"
  [ -z "$tiny" ] || echo "tiny models on ${HOSTS_CPUS:-2} CPU processes: no figure here means anything"
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.max.sm,power.limit --format=csv
    nvidia-smi topo -m
  fi
  echo "cores: $(nproc), load: $(cut -d' ' -f1-3 /proc/loadavg)"
  grep -E 'MemTotal|MemAvailable' /proc/meminfo
  df -h "$work"
}
profile() {
  profiled=1
  [ -n "$tiny" ] || limited 60 "$python" -m benchmarks.limit touch \
    "${HOSTS_TOUCH_GIB:-$(awk '/MemAvailable/ {print int(0.85 * $2 / 2^20)}' /proc/meminfo)}"
  go bigplan profile --quick --nvme "$HOSTS_SCRATCH" --name hosts-profiled "${devices[@]}" \
    --out "$HOSTS_CLUSTER"
}
predict() {
  predicted=1
  hosts predict "$work"
}
ready() { # the rates of this machine, and promises made with them before anything runs
  [ -n "$profiled" ] || [ -f "$HOSTS_CLUSTER" ] || profile || return
  [ -n "$predicted" ] || [ -f "$work/predictions.json" ] || predict
}
rates() {
  profile
  measured 60 copies | tee -a "$work/rates.txt"
  measured 60 updates | tee -a "$work/rates.txt"
}
equality() {
  if [ -z "$tiny" ]; then
    limited 300 "$python" -m pytest -v -m gpu --timeout=240 --durations=8 -p no:cacheprovider \
      --junitxml="$work/tests.xml" tests/runtime/parallel/test_sharded_gpu.py tests/runtime/checkpoint/test_gpu.py
    limited 540 "$python" -m benchmarks.layouts --device cuda | tee "$work/layouts.txt"
  else
    limited 540 "$python" -m benchmarks.layouts --steps 4 --only dp2 z3 "z3, spread > dp2" | tee "$work/layouts.txt"
  fi
}
faults() {
  local model=llama-3.2-1b length=4096 who
  [ -z "$tiny" ] || { model=tiny-llama-test length=64; }
  for who in worker launch; do
    limited 150 "$python" -m benchmarks.gpu_kill $who "$work/kill-$who" --cluster "$HOSTS_CLUSTER" --model $model \
      --cap gpu=24GiB --seq-len $length --global-batch 8 --set zero=3 2>&1 | tee -a "$work/faults.txt"
  done
  go bigplan plan --model tiny-llama-demo --cluster "$HOSTS_CLUSTER" --engine native --seq-len 512 --global-batch 8 --deterministic \
    --set zero=3 --out "$work/faults.plan.yaml" >/dev/null
  [ "$(left)" -lt $least ] || limited "$(left)" "$python" -m benchmarks.kill_soak "$work/faults.plan.yaml" \
    --folder "$work/faults" --ends 4 --steps 40 --how launch,worker 2>&1 | tee -a "$work/faults.txt"
}
built() { # DeepSpeed's compile what they need once
  [ -n "$tiny" ] || [ -f "$work/built" ] || {
    go "$python" -m benchmarks.peers.run "$work" build --minutes "$(left_minutes)" && go touch "$work/built"
  }
}
part() {
  case $1 in
    rates | equality) "$1" ;;
    predict) { [ -f "$HOSTS_CLUSTER" ] || profile; } && predict ;;
    faults) ready && faults ;;
    waits) measured 400 waits | tee -a "$work/rates.txt" ;;
    soak)
      measured "$(left)" soak "$(($(left) - 60))" | tee -a "$work/rates.txt"
      awk '/^soak:/ {rounds += $2; seconds += $8} END {print rounds, "rounds so far, in", seconds, "s"}' "$work/rates.txt"
      ;;
    table) hosts table "$work" | tee "$work/table.txt" ;;
    *) ready && { built; hosts run "$work" "$1" "$(left_minutes)"; } ;;
  esac
}
known() {
  case $1 in
    rates | predict | waits | soak | equality | faults | table) ;;
    *) grep -q "part: $1\b" benchmarks/hosts/cases.yaml ;;
  esac
}
save() { # what there is so far, in case that the rest of the call is cut off
  local name
  for name in cluster.yaml predictions.json peers.json rates.txt layouts.txt faults.txt table.txt; do
    [ ! -f "$work/$name" ] || cp "$work/$name" "$out/"
  done
  tar czf "$work.tgz" -C "$work" . && mv "$work.tgz" "$out/hosts.tgz"
}
main() {
  local name began
  environment 2>&1 | tee -a "$work/environment.txt"
  for name in "$@"; do
    began=$SECONDS
    if [ "$(left)" -lt $least ]; then
      echo "=== $name: not started, the $minutes minutes are over"
      continue
    fi
    echo "=== $name ($(left) s left)"
    part "$name" || echo "=== $name: FAILED"
    echo "=== $name: $((SECONDS - began)) s"
    [ -n "$dry" ] || save
  done
}

for name in "$@"; do
  known "$name" || { echo "unknown part $name; parts are told by $0 alone" >&2; exit 2; }
done
mkdir -p "$work" "$HOSTS_SCRATCH"
ulimit -l unlimited 2>/dev/null || echo "page-locked memory is limited to $(ulimit -l) KiB" >&2
main "$@" 2>&1 | tee -a "$out/log.txt"
[ -n "$dry" ] || save
