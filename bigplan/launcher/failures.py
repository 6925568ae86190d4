"""What went wrong on a rank, in the user's words, and whether fresh ranks may get further."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigplan.errors import BigplanError, LostError, NodeLostError, WorkerError
from bigplan.launcher.nodes import Node, gone

# Words in torch's errors of failed collectives; errors of bugs, which fail every time, have none.
_COLLECTIVE = re.compile("gloo|nccl|ProcessGroup", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank."""

    rank: int
    error: Exception


def told(
    failures: Sequence[Failure], doing: str, nodes: Mapping[int, Node], cut: str = ""
) -> BigplanError:
    """The failure that explains the others: a lost node, a death, bigplan's own errors, the rest.

    `nodes`: where ranks are, as far as it is known. `cut`: what of the data was cut short, which
    fresh ranks would take for all of it.
    """

    def weight(failure: Failure) -> tuple[int, int]:
        if _has_ended(failure):
            return 0, failure.rank
        return (1 if isinstance(_cause(failure), BigplanError) else 2), failure.rank

    first = min(failures, key=weight)
    cause = _cause(first)
    if isinstance(cause, BigplanError):
        return cause
    error: BigplanError | None = node_lost(nodes, doing) if _may_go_on(first) else None
    if error is None:
        cut = cut if _has_ended(first) else ""
        kind = LostError if _may_go_on(first) and not cut else WorkerError
        error = kind(_description(first, failures, doing, cut))
    error.add_note("\n".join("".join(traceback.format_exception(f.error)) for f in failures))
    return error


def node_lost(nodes: Mapping[int, Node], doing: str) -> NodeLostError | None:
    """The nodes that are gone, and their ranks; None: all of them answer."""
    lost = gone(dict.fromkeys(nodes.values()))
    if not lost:
        return None
    ranks = [rank for rank, node in sorted(nodes.items()) if node in lost]
    names = " and ".join(node.there for node in lost)
    what = f"node {names} was" if len(lost) == 1 else f"nodes {names} were"
    which = "rank" if len(ranks) == 1 else "ranks"
    listed = ", ".join(map(str, ranks))
    return NodeLostError(
        f"{what} lost with {which} {listed} while {doing}: Ray's process there does not answer",
        tuple(ranks),
    )


def _may_go_on(failure: Failure) -> bool:
    """Whether fresh ranks may get further: not where a plan does not fit, or by a bug of ours."""
    if _has_ended(failure):
        return not (_was_not_created(failure) or _was_out_of_memory(failure))
    cause = _cause(failure)
    return isinstance(cause, RuntimeError) and bool(_COLLECTIVE.search(str(cause)))


def _has_ended(failure: Failure) -> bool:
    """Whether the process is gone, or never came because its node was lost."""
    import ray.exceptions as known

    kinds = (known.RayActorError, known.ActorUnschedulableError, known.NodeDiedError)
    return isinstance(failure.error, kinds)


def _was_not_created(failure: Failure) -> bool:
    return "creation task" in str(failure.error)


def _was_out_of_memory(failure: Failure) -> bool:
    text = str(failure.error)
    return "memory pressure" in text or "low on memory" in text


def _description(first: Failure, failures: Sequence[Failure], doing: str, cut: str) -> str:
    import ray

    if not isinstance(first.error, ray.exceptions.RayActorError):
        told = "; ".join(
            f"rank {failure.rank}: {type(_cause(failure)).__name__}: {_first_line(_cause(failure))}"
            for failure in sorted(failures, key=lambda failure: failure.rank)
        )
        return f"failed while {doing}: {told}"
    if _was_not_created(first):
        return (
            f"rank {first.rank} could not be created: "
            f"{str(first.error).strip().splitlines()[-1].strip()}. "
            "Every node needs the same version of bigplan[launch] installed"
        )
    if _was_out_of_memory(first):
        return (
            f"rank {first.rank} died while {doing}: Ray stopped it because its node's memory was "
            "full; plan with less, such as --cap host=SIZE, or free memory on that machine"
        )
    if cut:
        return f"rank {first.rank} died while {doing}: {cut}"
    return (
        f"rank {first.rank} died while {doing}: its process ended without saying why. Most often "
        "the host ran out of memory (`dmesg` shows whether the kernel killed it): plan with less, "
        "such as --cap host=SIZE, or free memory on that machine"
    )


def _cause(failure: Failure) -> Exception:
    cause = getattr(failure.error, "cause", None)
    return cause if isinstance(cause, Exception) else failure.error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
