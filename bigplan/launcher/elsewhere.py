"""What killed launches left on the nodes of a Ray cluster: each is asked by a task there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bigplan.errors import BigplanError, WorkerError
from bigplan.launcher.leftovers import Leftover, clean, leftovers
from bigplan.launcher.nodes import Node, answering, known

SECONDS = 120.0  # for a node's answer: it may have to import all first


@dataclass(frozen=True)
class Elsewhere:
    """What one launch left on one node."""

    node: Node
    left: Leftover

    def clean(self) -> None:
        """As leftovers.clean, on its node. Raises as that."""
        _on((self.node,), clean, self.left)


def left_on_nodes() -> tuple[Elsewhere, ...]:
    """On all nodes that answer, in the Ray of this process; nodes of one machine once.

    Raises WorkerError where a node cannot be asked.
    """
    nodes = answering(known())
    found, seen = list[Elsewhere](), set[tuple[str, str]]()
    for node, each in zip(nodes, _on(nodes, leftovers), strict=True):
        for left in each:
            where = left.entry.host, str(left.listed)
            if where not in seen:
                seen.add(where)
                found.append(Elsewhere(node, left))
    return tuple(found)


def _on(nodes: Iterable[Node], work: Any, *arguments: object) -> list[Any]:
    """What a function returns on each node. Raises its BigplanErrors, and WorkerError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = [
        ray.remote(work)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.key, soft=False),
        )
        .remote(*arguments)
        for node in nodes
    ]
    try:
        return list(ray.get(asked, timeout=SECONDS))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BigplanError):
            raise error.cause from None
        raise WorkerError(f"a node could not be looked at: {error.cause}") from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        first = (str(error).strip().splitlines() or ["no answer"])[0]
        raise WorkerError(f"a node could not be looked at: {first}") from error
