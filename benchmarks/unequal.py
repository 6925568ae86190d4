"""What unlike groups of nodes gain from micro-batches of sizes of their own, and what it costs.

    python -m benchmarks.unequal

Every choice of groups is planned, once with equal work alone and once with both kinds, simulated on
shipped clusters. The last line of a case has the CPU seconds that both searches took.
"""

from __future__ import annotations

import time

from bigplan.engines import make_plan
from bigplan.engines.mixed import Ways, best_mix
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.link import find_network
from bigplan.spec.training import Training

LENGTH = 4096
CASES: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("llama-3-70b", 256, {"dgx-h100": 2, "dgx-a100-80g": 4}),
    ("llama-3-8b", 512, {"dgx-h100": 2, "dgx-a100-80g": 4}),
    ("llama-3.2-3b", 96, {"rtx-4090x2-workstation": 1, "rtx-3090x4-workstation": 1}),
    ("llama-3.2-3b", 64, {"rtx-4090x2-workstation": 2, "rtx-3090x4-workstation": 2}),
)
EACH = {"rtx-3090x4-workstation": 2}  # GPUs: as many as the machine beside it has
NETWORK = "ethernet-100g"  # where a shipped machine has none


def mixed(nodes: dict[str, int]) -> Cluster:
    """So many of each machine."""
    return Cluster(name="unlike", node_groups=tuple(_group(n, k) for n, k in nodes.items()))


def _group(name: str, nodes: int) -> NodeGroup:
    found = find_cluster(name).group
    network = found.inter_node or find_network(NETWORK)
    changes = {"name": name, "nodes": nodes, "inter_node": network}
    if name in EACH:
        changes["gpus_per_node"] = EACH[name]
    return found.model_copy(update=changes)


def _equal(request: Request) -> Plan:
    """The best plan with equal work."""
    ways = Ways(make_plan, lambda *_: None, lambda plan: plan, lambda plan, _: plan)
    found, _ = best_mix(request, ways)
    return found


def main() -> None:
    """Each case."""
    for model, batch, nodes in CASES:
        training = Training(sequence_length=LENGTH, global_batch=batch)
        request = Request(find_model(model), training, mixed(nodes), engine="native")
        machines = ", ".join(f"{number} x {name}" for name, number in nodes.items())
        print(f"{model}, {batch} sequences of {LENGTH} tokens, on {machines}")
        took = []
        for plan_all in (_equal, make_plan):
            begun = time.process_time()
            plan = plan_all(request)
            took.append(time.process_time() - begun)
        for mix in plan.search.mixes:
            sizes = f" {' : '.join(map(str, mix.micro_batches))}" if mix.unequal else ""
            step = f"{mix.step_seconds:.1f} s" if mix.step_seconds else mix.refusal
            print(f"  {' + '.join(mix.groups)}{sizes}: {step}")
        print(f"  CPU seconds: {took[0]:.1f} with equal work alone, {took[1]:.1f} with both")


if __name__ == "__main__":
    main()
