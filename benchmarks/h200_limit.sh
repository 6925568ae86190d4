#!/usr/bin/env bash
# Measures out-of-memory training on one H200 in parts, one after the other, within one time.
# Usage: h200_limit.sh [--dry] OUT PART...
#   tests     tests marked gpu, those of what ran least on a GPU first, then the kernels' tests
#   profile   touches the host's memory, then bigplan profile --quick with the drive
#   predict   plans of all cases with that profile, and what they promise
#   a ... g   the cases of limit/ whose names begin so; a1, c3-16b, ... likewise
#   peers-a   peers of these cases (also -b -c -d -g); any name in peers/cases.yaml likewise
#   table     what was promised, measured and reached by peers, so far
# Cases profile and predict first if nobody has, peers build first. LIMIT_WORK (/tmp/h200-limit) keeps
# everything from one call to the next; OUT gets log.txt and, after every part, limit.tgz with all of
# it and the files to look at first. LIMIT_MINUTES (9.2) is the time of the call: what would begin
# after it does not. Part of it is a case's LIMIT_SECONDS (90; 150 on a drive), see limit.py.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
dry=
[ "${1:-}" = --dry ] && { dry=1; shift; }
[ $# -ge 2 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" || exit
out=$(realpath "$1")
shift
python=${PYTHON:-python3}
work=${LIMIT_WORK:-/tmp/h200-limit}
minutes=${LIMIT_MINUTES:-9.2}
end=$((SECONDS + $(awk "BEGIN {print int(60 * $minutes)}")))
least=30 # seconds in which nothing worth having can be done
profiled='' predicted='' built=''
export COLUMNS=200 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export LIMIT_CLUSTER=$work/cluster.yaml LIMIT_SCRATCH=$work-drive LIMIT_STEPS=${LIMIT_STEPS:-4} LIMIT_TRACE=${LIMIT_TRACE-1}

left() { echo $((end - SECONDS)); }
left_minutes() { awk "BEGIN {print $(left) / 60}"; }
go() { # a command, or in a dry run what it would be
  echo "+ $*"
  [ -n "$dry" ] || "$@"
}
bigplan() { "$python" -c 'from bigplan.cli import main; main()' "$@"; }
limited() { # SECONDS COMMAND...: interrupted after its time or the call's, so that it can still tell
  local seconds=$1
  shift
  [ "$seconds" -le "$(left)" ] || seconds=$(left)
  go timeout -s INT -k 15 "$seconds" "$@"
}

environment() {
  date -u +%F
  "$python" -c "import platform, torch, triton; print('python', platform.python_version(), 'torch', torch.__version__, 'triton', triton.__version__)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.max.sm,power.limit,temperature.gpu --format=csv
  echo "cores: $(nproc), load: $(cut -d' ' -f1-3 /proc/loadavg)"
  grep -E 'MemTotal|MemAvailable' /proc/meminfo
  df -h "$work"
}
tests() {
  local found
  mapfile -t found < <({
    printf 'tests/runtime/%s.py\n' layers/test_products execution/test_streaming optimizer/test_fused test_gpu checkpoint/test_gpu
    grep -rlE 'mark\.gpu\b' tests --include='test_*.py'
  } | awk '!seen[$0]++' | xargs -r ls -U 2>/dev/null)
  limited 240 "$python" -m pytest -v -m gpu --timeout=90 --durations=8 -p no:cacheprovider \
    --continue-on-collection-errors --junitxml="$work/tests.xml" "${found[@]}"
  limited 60 "$python" -m pytest -q --timeout=60 -p no:cacheprovider --junitxml="$work/kernels.xml" tests/kernels
}
profile() {
  go "$python" -m benchmarks.limit touch "${LIMIT_TOUCH_GIB:-112}"
  profiled=1
  go bigplan profile --quick --nvme "$LIMIT_SCRATCH" --name h200-1x-profiled --out "$LIMIT_CLUSTER" &&
    go "$python" -m benchmarks.limit room "$LIMIT_CLUSTER" "$LIMIT_SCRATCH"
}
predict() {
  predicted=1
  go "$python" -m benchmarks.limit predict "$work"
}
ready() { # the rates of this machine, and promises made with them before anything runs
  [ -n "$profiled" ] || [ -f "$LIMIT_CLUSTER" ] || profile || return
  [ -n "$predicted" ] || [ -f "$work/predictions.json" ] || predict
}
cases() {
  ready || return
  local seconds=90
  [ "${1:0:1}" = d ] && seconds=150
  go env LIMIT_SECONDS="${LIMIT_SECONDS:-$seconds}" LIMIT_MINUTES="$(left_minutes)" \
    "$python" -m benchmarks.limit run "$work" "$1"
}
peers() { # DeepSpeed's compile what they need once
  local names=("$@")
  if [[ "$*" == *zero* || "$*" == *infinity* ]] && [ -z "$built" ] && [ ! -f "$work/built" ]; then
    names=(build "$@")
    built=1
    go touch "$work/built"
  fi
  go "$python" -m benchmarks.peers.run "$work" "${names[@]}" --minutes "$(left_minutes)"
}
part() {
  case $1 in
    tests | profile | predict) "$1" ;;
    table) go "$python" -m benchmarks.limit table "$work" | tee "$work/table.txt" ;;
    peers-a) peers zero2-5.5b-24gib fsdp2-5.5b-24gib zero3-5.5b-24gib ;;
    peers-b) peers plain-5.5b-mb2 plain-5.5b-mb2-compile plain-5.5b-mb2-16k ;;
    peers-c) peers zero3-13b-half ;;
    peers-d) peers infinity-3.3b-state ;;
    peers-g) peers zero2-3.3b-16gib fsdp2-3.3b-16gib ;;
    *) if is_case "$1"; then cases "$1"; else peers "$1"; fi ;;
  esac
}
is_case() { compgen -G "benchmarks/limit/$1*.yaml" >/dev/null; }
known() {
  case $1 in
    tests | profile | predict | table | peers-[abcdg]) ;;
    *) is_case "$1" || grep -q "^  $1:" benchmarks/peers/cases.yaml ;;
  esac
}
save() { # what there is so far, in case that the rest of the call is cut off
  local name
  for name in cluster.yaml predictions.json peers.json table.txt; do
    [ ! -f "$work/$name" ] || cp "$work/$name" "$out/"
  done
  tar czf "$out/.limit.tgz" -C "$work" . && mv "$out/.limit.tgz" "$out/limit.tgz"
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
mkdir -p "$work" "$LIMIT_SCRATCH"
ulimit -l unlimited 2>/dev/null || echo "page-locked memory is limited to $(ulimit -l) KiB" >&2
clock=
if [ -z "$dry" ] && command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active \
    --format=csv -l 1 >>"$work/clock.csv" &
  clock=$!
fi
main "$@" 2>&1 | tee "$out/log.txt"
[ -z "$clock" ] || kill "$clock" 2>/dev/null
[ -n "$dry" ] || save
