#!/usr/bin/env bash
# On one GPU: do sharded ranks compute what a plain loop does there, and is one process as fast as
# before there were several?
# Usage: h200_sharded.sh OUT OLD NEW PART...
#   tests   NEW's tests of sharded ranks and checkpoints on a GPU
#   profile bigplan profile --quick by OLD, whose file both read
#   speed   5.5B with the GPU held to 24 GiB (limit/a2) by OLD, NEW, OLD, NEW, ... in turns
# OLD and NEW are source trees: those of commit 8126b41 and of the newest, say, made by
# `git archive COMMIT | tar x -C FOLDER`. Both plan with one profile, and neither looks at the host
# again before it runs, which would change its plan from run to run. SHARDED_TURNS (2) is how often
# each runs, SHARDED_STEPS (6) the steps of a run, SHARDED_CASE (a2) the case, SHARDED_WORK
# (/tmp/h200-sharded) what stays from call to call. Calls of ten minutes: "tests", "profile speed".
set -uo pipefail
[ $# -ge 4 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" || exit
out=$(realpath "$1") old=$(realpath "$2") new=$(realpath "$3")
shift 3
python=${PYTHON:-python3}
work=${SHARDED_WORK:-/tmp/h200-sharded}
turns=${SHARDED_TURNS:-2}
case=${SHARDED_CASE:-a2}
export COLUMNS=200 PYTHONUNBUFFERED=1 LIMIT_SCRATCH=$work-drive LIMIT_TRACE='' LIMIT_STEPS=${SHARDED_STEPS:-6}
mkdir -p "$work" "$LIMIT_SCRATCH"

in_tree() { # TREE COMMAND...
  local tree=$1
  shift
  (cd "$tree" && PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}" "$@")
}
expected() {
  cat <<'TEXT'
Expected, written before anything ran:
tests    every plan of ZeRO 1, 2 and 3 on two ranks of one GPU is within rounding of the plain loop,
         both ranks end with the same digest and losses; state comes back from checkpoints bit by bit
speed    NEW's median step is within 1% of OLD's: a run of one rank has no communicator, its parts of
         layers are whole layers, and its plan is the same but for thousandths of a layer (each plans
         with its own code). Steps of one plan differ by up to 1% from run to run, and by more where
         others use the host's memory, so turns alternate
TEXT
}
environment() {
  date -u +%F
  "$python" -c "import platform, torch; print('python', platform.python_version(), 'torch', torch.__version__)"
  command -v nvidia-smi >/dev/null &&
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.max.sm,power.limit --format=csv
  echo "cores: $(nproc), load: $(cut -d' ' -f1-3 /proc/loadavg)"
  grep -E 'MemTotal|MemAvailable' /proc/meminfo
}
tests() {
  in_tree "$new" timeout -s INT -k 15 540 "$python" -m pytest -v -m gpu --timeout=400 --durations=8 \
    -p no:cacheprovider tests/runtime/parallel/test_sharded_gpu.py tests/runtime/checkpoint/test_gpu.py
}
profile() {
  in_tree "$old" "$python" -m benchmarks.limit touch "${SHARDED_TOUCH_GIB:-112}"
  in_tree "$old" "$python" -c 'from bigplan.cli import main; main()' profile --quick \
    --name h200-1x-profiled --out "$work/cluster.yaml"
}
plan() { # TREE NAME: the case planned by a tree, and the part of the plan that says what runs
  in_tree "$1" env LIMIT_CLUSTER="$work/cluster.yaml" "$python" -m benchmarks.limit predict "$work/$2" "$case"
  for file in "$work/$2"/*.plan.yaml; do
    "$python" - "$file" <<'PY' >"$work/$2.placement"
import sys, yaml
plan = yaml.safe_load(open(sys.argv[1]))
print(yaml.safe_dump({key: plan[key] for key in ("strategy", "placement")}))
PY
  done
}
speed() {
  [ -f "$work/cluster.yaml" ] || profile
  plan "$old" old
  plan "$new" new
  diff "$work/old.placement" "$work/new.placement" >"$work/plans.diff" && echo "both plans are the same" ||
    { echo "plans differ:"; cat "$work/plans.diff"; }
  for turn in $(seq "$turns"); do
    for which in old new; do
      local tree=$old
      [ $which = old ] || tree=$new
      rm -rf "$work/$turn-$which"
      cp -r "$work/$which" "$work/$turn-$which"
      echo "== turn $turn, $which"
      in_tree "$tree" env -u LIMIT_CLUSTER LIMIT_SECONDS="${SHARDED_SECONDS:-60}" \
        "$python" -m benchmarks.limit run "$work/$turn-$which" "$case"
    done
  done
  compare | tee "$out/table.txt"
}
compare() {
  "$python" - "$work" <<'PY'
import json, statistics, sys
from pathlib import Path

found = {"old": [], "new": []}
for folder in sorted(Path(sys.argv[1]).glob("[0-9]*-*")):
    which = folder.name.partition("-")[2]
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        if path.stem != "predictions" and "seconds" in record:
            steps = record["seconds"][1:]
            found[which] += steps
            clock = (record["gpu_state"] or {}).get("clock_hertz", 0) / 1e9
            told = " ".join(f"{step:.3f}" for step in steps)
            print(f"{folder.name:8s} {path.stem:24s} median {statistics.median(steps):.3f} s at {clock:.2f} GHz: {told}")
if all(found.values()):
    old, new = (statistics.median(found[which]) for which in ("old", "new"))
    print(f"old {old:.3f} s, new {new:.3f} s: {new / old - 1:+.2%} (bound +1%)")
    sys.exit(new > 1.01 * old)
print("not all ran")
sys.exit(1)
PY
}
main() {
  environment
  expected
  for part in "$@"; do
    echo "=== $part"
    "$part" || echo "=== $part: FAILED"
  done
}

for name in "$@"; do
  case $name in
    tests | profile | speed) ;;
    *) echo "unknown part $name; parts are told by $0 alone" >&2; exit 2 ;;
  esac
done
ulimit -l unlimited 2>/dev/null || echo "page-locked memory is limited to $(ulimit -l) KiB" >&2
main "$@" 2>&1 | tee -a "$out/log.txt"
[ ! -f "$work/cluster.yaml" ] || cp "$work/cluster.yaml" "$out/"
tar czf "$out/sharded.tgz" -C "$work" .
