"""What a longer patience of the search finds, and what it takes.

Usage: python -m benchmarks.search_patience    (three minutes on two cores)

Models on GPUs whose network is slow for them: there estimates are 1 to 1.5 times below simulated
steps, by an amount that differs from strategy to strategy. Each case is searched with PATIENCE for
every strategy, and as usual, when strategies far below the best plan are always tried; a line says
how long the best step takes, how many strategies were simulated and how long the search took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

from bigplan.solve import search as module
from bigplan.solve.candidate import Workload
from bigplan.solve.search import Found, Scope, search
from bigplan.solve.thresholds import PATIENCE, patience
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.link import find_network
from bigplan.spec.training import Training

MODELS = "llama-3-8b", "llama-2-13b", "llama-3-70b"
NODES = 4, 8
BATCHES = 16, 64, 512


def groups() -> dict[str, NodeGroup]:
    """Nodes of one and of eight consumer GPUs on 50 Gb/s Ethernet, and a cloud's."""
    desk = find_cluster("rtx-4090-workstation").group
    network = find_network("ethernet-50g")
    found = {
        f"{gpus} x RTX 4090": desk.model_copy(
            update={"gpus_per_node": gpus, "inter_node": network, "nodes": 2}
        )
        for gpus in (1, 8)
    }
    return found | {"8 x L4": find_cluster("l4-cloud").group}


def timed(workload: Workload, rule: Callable[[float, float], float]) -> tuple[Found, float]:
    """The search with that rule for idle strategies, and its seconds."""
    start = time.perf_counter()
    with patch.object(module, "patience", rule):
        return search(workload, Scope()), time.perf_counter() - start


def main() -> None:
    """A line per case."""
    print(f"{'model':12s} {'node':12s} nodes batch  step s  sims      s   step s  sims      s")
    for (name, group), model, nodes, batch in product(groups().items(), MODELS, NODES, BATCHES):
        spec = find_model(model)
        length = min(8192, spec.max_sequence_length)
        training = Training(sequence_length=length, global_batch=batch)
        workload = Workload(spec, training, group.model_copy(update={"nodes": nodes}))
        told = f"{model:12s} {name:12s} {nodes:5d} {batch:5d}"
        steps = []
        for rule in (lambda expected, best: PATIENCE, patience):
            found, seconds = timed(workload, rule)
            steps.append(found.best.seconds)
            told += f" {found.best.seconds:8.3f} {found.programs:5d} {seconds:6.2f}"
        gain = steps[0] / steps[1] - 1
        print(told + (f"  {gain:+.1%}" if abs(gain) > 1e-4 else ""), flush=True)


if __name__ == "__main__":
    main()
