#!/usr/bin/env bash
# Trains a plan over the nodes of a Slurm job: sbatch launch/slurm.sh plan.yaml [options of bigplan launch]
# Of several nodes bigplan has to be told where ranks listen: --interface NAME, such as ib0 or eth0.
# Needs on every node: bigplan[launch] in PATH, and this folder (where the run goes, unless --run-dir says otherwise).
#SBATCH --job-name=bigplan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
# A job that shares no node has all cores, but all memory only where it asks for it (--mem=0).
# Five minutes before its time is over the run writes a last checkpoint; go on with --resume RUN.
set -euo pipefail

plan=${1:?"usage: sbatch $0 PLAN [options of bigplan launch]"}
port=${RAY_PORT:-6379}
patience=${RAY_PATIENCE:-300} # seconds for all nodes to join
nodes=$SLURM_JOB_NUM_NODES

# Whoever has the token may run code as you, so every job has its own.
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}
# Ray shares a node's cores out itself: Slurm may bind its one task to a single core.
export SLURM_CPU_BIND=none
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head") # no function: signals have to reach srun itself
ip=127.0.0.1 # of one node without a network
# A name may mean 127.0.1.1 on its own machine (Debian), or an IPv6 address first.
for each in $("${on_head[@]}" sh -c 'hostname --ip-address; hostname --all-ip-addresses'); do
    case $each in 127.* | *:*) ;; *) ip=$each && break ;; esac
done
address=$ip:$port

ray_steps=()
trap 'kill "${ray_steps[@]}" 2>/dev/null || true' EXIT

joined() {
    "${on_head[@]}" python3 -c '
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))
' "$address" "$1" 2>/dev/null
}
wait_for() {
    until joined "$1"; do
        if [ "$SECONDS" -gt "$patience" ]; then
            echo "of $1 node(s) not all have joined Ray at $address after $patience s; look at the job's output" >&2
            exit 4
        fi
        sleep 1
    done
}

"${on_head[@]}" ray start --head --block --node-ip-address="$ip" --port="$port" --include-dashboard=false &
ray_steps+=($!)
wait_for 1
if [ "$nodes" -gt 1 ]; then
    srun --overlap --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$head" \
        ray start --address="$address" --block &
    ray_steps+=($!)
    wait_for "$nodes"
fi

"${on_head[@]}" bigplan launch "$plan" --address "$address" "${@:2}" &
run=$!
warned=yes
trap 'warned=yes; kill -TERM "$run" 2>/dev/null || true' TERM
while [ "$warned" = yes ]; do # a signal ends a wait, not the run
    warned=no status=0
    wait "$run" || status=$?
done
exit "$status"
