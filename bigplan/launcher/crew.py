"""The ranks of a plan as Ray actors: placed together, asked together, stopped together."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from bigplan.errors import BigplanError, LostError, PreflightError, WorkerError
from bigplan.launcher.actor import Folders, RankActor, WorkerType
from bigplan.launcher.heartbeat import GROUP, Allowed, Heartbeat
from bigplan.plan import Plan
from bigplan.units import counted

PLACEMENT_SECONDS = 60.0  # a cluster that is up answers in seconds; autoscaling is asked for first
LOOK_SECONDS = 0.2  # how soon Ctrl-C is answered
MEETING = ".bigplan-meeting-"  # what the name of a folder where ranks meet begins with
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
GRACE_SECONDS = 3.0  # a dead rank's peers often fail first, for want of it
# In what torch says where a collective fails: of a bug that fails alike every time none is a word.
_COLLECTIVE = re.compile("gloo|nccl|ProcessGroup", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """How many ranks, where, and with how many cores each."""

    ranks: int
    per_node: int
    cores: int
    cuda: bool

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        """All GPUs of as many nodes as the plan needs; a node's cores are shared equally."""
        group = plan.cluster.group
        per_node = min(plan.strategy.ranks, group.gpus_per_node)
        cores = max(1, group.host.cores // per_node)
        return cls(plan.strategy.ranks, per_node, cores, group.gpu.device == "cuda")

    @property
    def nodes(self) -> int:
        """Nodes needed."""
        return -(-self.ranks // self.per_node)

    def bundle(self) -> dict[str, float]:
        """What one node must give."""
        bundle = {"CPU": float(self.cores * self.per_node)}
        return bundle | ({"GPU": float(self.per_node)} if self.cuda else {})


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank."""

    rank: int
    error: Exception


class Crew:
    """One actor per rank, for the length of a `with` block."""

    def __init__(
        self,
        plan: Plan,
        folders: Folders,
        local: bool,
        worker: WorkerType | None,
        meanwhile: Callable[[], None],
    ) -> None:
        """`meanwhile` is called a few times a second while the ranks are busy."""
        self._layout = Layout.of(plan)
        self._meanwhile = meanwhile
        self._local, self._folders = local, folders
        self._meeting: Path | None = None
        self._group = _place(self._layout)
        self._actors = [
            self._hire(rank).remote(plan, rank, folders, worker)
            for rank in range(self._layout.ranks)
        ]
        self._heartbeat, self._predicted = Heartbeat(self._actors), plan.predicted.step_seconds
        self._stepped = False

    def _hire(self, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # One process never gets another's cores; on this machine all stays on loopback.
        variables = {"OMP_NUM_THREADS": str(self._layout.cores)}
        if self._layout.cuda:
            # Read when torch is imported. Without it layers of changing sizes left 1.1 GiB of an
            # H200 held to 15 GiB reserved and unusable; with it 0.1.
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
            if self._layout.ranks > 1:
                # Read when CUDA is initialised: queues that streams share, 8 of them by default.
                # Two streams in one queue wait for each other, and with NCCL's there are ten.
                variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        if self._local:
            variables |= ON_LOOPBACK
        return ray.remote(concurrency_groups={GROUP: 1})(RankActor).options(
            num_cpus=self._layout.cores,
            num_gpus=1 if self._layout.cuda else 0,
            max_restarts=0,
            runtime_env={"env_vars": variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // self._layout.per_node
            ),
        )

    def meeting_point(self) -> Path:
        """A file for the ranks to meet at, in a folder that only this user may enter."""
        shared = None if self._local else self._folders.run  # None: this machine's own
        self._meeting = Path(mkdtemp(prefix=MEETING, dir=shared))
        return self._meeting / "addresses"

    def ask(self, method: str, *arguments: object, doing: str) -> list[Any]:
        """Call a method of every rank; results by rank.

        Raises the most telling rank's error, and LostError where one hangs.
        """
        allowed = Allowed.elsewhere()
        if method == "step":
            allowed = Allowed.in_step(self._predicted, first=not self._stepped)
        self._heartbeat.begin()
        called = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        results = self._collect(called, doing, allowed)
        self._stepped = self._stepped or method == "step"
        return results

    def _collect(self, references: Sequence[Any], doing: str, allowed: Allowed) -> list[Any]:
        import ray

        ranks = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = list(references)
        while waiting:
            timeout = GRACE_SECONDS if failures else LOOK_SECONDS
            done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
            self._meanwhile()
            if not done and failures:
                break
            if not done:
                self._heartbeat.look(allowed, doing)
                continue
            rank = ranks[done[0]]
            try:
                results[rank] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                failures.append(Failure(rank, error))
        if failures:
            raise _told(failures, doing)
        return [results[rank] for rank in range(len(references))]

    def dismiss(self, *, head: bool = True) -> None:
        """Kill every actor; none outlives a launch. Without Ray's `head` this process would end."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._meeting is not None:
            rmtree(self._meeting, ignore_errors=True)
        if head:
            ray.util.remove_placement_group(self._group)


def _place(layout: Layout) -> Any:
    """A placement group with one bundle per node: a node's ranks stay together."""
    import ray

    group = ray.util.placement_group(
        [layout.bundle()] * layout.nodes,
        strategy="STRICT_PACK" if layout.nodes == 1 else "STRICT_SPREAD",
    )
    if not group.wait(PLACEMENT_SECONDS if _plausible(layout) else 0):
        ray.util.remove_placement_group(group)
        have = "; ".join(
            ", ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in layout.bundle())
            for node in ray.nodes()
            if node["Alive"]
        )
        need = ", ".join(f"{amount:g} {name}s" for name, amount in layout.bundle().items())
        raise PreflightError(
            f"the plan needs {counted(layout.nodes, 'node')} with {need} each, free; "
            f"Ray has nodes with: {have}. Plan for the machines there are, or "
            "wait until they are free"
        )
    return group


def _plausible(layout: Layout) -> bool:
    """Whether enough nodes are large enough, busy or not."""
    import ray

    bundle = layout.bundle()
    fitting = [
        node
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(k, 0) >= v for k, v in bundle.items())
    ]
    return len(fitting) >= layout.nodes


def _told(failures: Sequence[Failure], doing: str) -> BigplanError:
    """The failure that explains the others: a death, then our own errors, then the rest."""
    import ray

    def weight(failure: Failure) -> tuple[int, int]:
        if isinstance(failure.error, ray.exceptions.RayActorError):
            return 0, failure.rank
        return (1 if isinstance(_cause(failure), BigplanError) else 2), failure.rank

    first = min(failures, key=weight)
    cause = _cause(first)
    if isinstance(cause, BigplanError):
        return cause
    kind = LostError if _may_go_on(first) else WorkerError
    error = kind(_description(first, failures, doing))
    error.add_note("\n".join("".join(traceback.format_exception(f.error)) for f in failures))
    return error


def _may_go_on(failure: Failure) -> bool:
    """Whether fresh ranks may get further: not where a plan does not fit, or by a bug of ours."""
    import ray

    if isinstance(failure.error, ray.exceptions.RayActorError):
        return not (_was_not_created(failure) or _was_out_of_memory(failure))
    cause = _cause(failure)
    return isinstance(cause, RuntimeError) and bool(_COLLECTIVE.search(str(cause)))


def _was_not_created(failure: Failure) -> bool:
    return "creation task" in str(failure.error)


def _was_out_of_memory(failure: Failure) -> bool:
    text = str(failure.error)
    return "memory pressure" in text or "low on memory" in text


def _description(first: Failure, failures: Sequence[Failure], doing: str) -> str:
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
