"""The ranks of a plan as Ray actors: placed together, asked together, stopped together."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from bigplan.errors import NodeLostError
from bigplan.launcher import placing
from bigplan.launcher.actor import Folders, PairActor, WorkerType
from bigplan.launcher.checkpoints import FOLDER, checkpoints
from bigplan.launcher.failures import Failure, node_lost, told
from bigplan.launcher.heartbeat import GROUP, Allowed, Heartbeat
from bigplan.launcher.inputs import cut_short, data_sizes
from bigplan.launcher.nodes import Node, keys, known
from bigplan.launcher.places import Places, receive, shared_out
from bigplan.launcher.placing import Layout
from bigplan.launcher.preflight import (
    MARK,
    interface_of,
    require_alike,
    require_clock,
    require_same_gpu,
)
from bigplan.plan import Plan
from bigplan.ranks import Coordinates, seat

LOOK_SECONDS = 0.2  # how soon Ctrl-C is answered
GRACE_SECONDS = 3.0  # a dead rank's peers often fail before it is found
QUIET_SECONDS = 5.0  # without an answer from a rank, after which its node is asked


class Crew:
    """One actor per rank, for the length of a `with` block."""

    def __init__(
        self,
        plan: Plan,
        folders: Folders,
        interface: str | None,
        worker: WorkerType | None,
        meanwhile: Callable[[], None],
    ) -> None:
        """`interface`: where the ranks of several nodes listen. `meanwhile` is called a few times
        a second while the ranks are busy.
        """
        self._plan, self._layout = plan, Layout.of(plan)
        self._meanwhile = meanwhile
        self._interface, self._folders = interface, folders
        self._meeting: Path | None = None
        self._board: Any = None
        self._nodes: dict[int, Node] = {}  # by rank, once they were asked
        self._places: Places | None = None  # None: all nodes see the launch's run folder
        self._asked_nodes = 0.0
        self._group = placing.place(self._layout)
        self._actors = [
            self._hire(rank).remote(plan, rank, folders, worker)
            for rank in range(self._layout.ranks)
        ]
        self._heartbeat, self._predicted = Heartbeat(self._actors), plan.predicted.step_seconds
        self._data, self._stepped = data_sizes(plan.training), False

    def _hire(self, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = seat(rank, self._plan.strategy) // self._layout.per_node
        # One process never gets another's cores.
        variables = placing.priority() | {"OMP_NUM_THREADS": str(self._layout.cores)}
        if self._layout.cuda:
            # Read when torch is imported. Without it layers of changing sizes left 1.1 GiB of an
            # H200 held to 15 GiB reserved and unusable; with it 0.1.
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
            if self._layout.ranks > 1:
                # Read when CUDA is initialised: queues that streams share, 8 of them by default.
                # Two streams in one queue wait for each other, and with NCCL's there are ten.
                variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        return ray.remote(concurrency_groups={GROUP: 1})(PairActor).options(
            num_cpus=self._layout.cores,
            num_gpus=1 if self._layout.cuda else 0,
            max_restarts=0,
            runtime_env={"env_vars": variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        )

    def prepare(self) -> str:
        """Look at every node, before anything is allocated; what to tell of it, if anything.

        Raises PreflightError.
        """
        mark, token = self._folders.run / f"{MARK}{secrets.token_hex(4)}", secrets.token_hex(16)
        mark.write_text(token)
        try:
            cuda = self._layout.cuda
            found = self.ask("look", mark, token, cuda, doing="looking at its machine")
        finally:
            mark.unlink()
        nodes = {node.key: node for node in known()}
        if gone := tuple(n for n, each in enumerate(found) if each.node not in nodes):
            listed = ", ".join(map(str, gone))
            raise NodeLostError(f"the node of ranks {listed} was lost as it was looked at", gone)
        self._nodes = {n: nodes[each.node] for n, each in enumerate(found)}
        facts = {node.there: found[rank] for rank, node in self._first_ranks().items()}
        require_alike(facts, self._folders.scratch)
        for alike in self._alike():
            require_same_gpu({name: facts[name] for name in alike})
        for rank, node in self._first_ranks().items():
            self._check_clock(rank, node)
        if not all(fact.shared for fact in facts.values()):
            self._places = self._found_places()
        outside = not all(node.only_loopback for node in self._nodes.values())
        self.ask("listen", interface_of(facts, self._interface, outside=outside), doing="starting")
        told = [
            f"On node {name}: {left}; `bigplan clean --address` removes it"
            for name, fact in facts.items()
            for left in fact.left
        ]
        if self._places is not None:
            told.append(
                f"Not all nodes see {self._folders.run}: {', '.join(self._places.ranks)} each keep "
                "the checkpoint files that their ranks write"
            )
        return "\n".join(told)

    def _alike(self) -> list[list[str]]:
        """The nodes whose GPUs are one kind, as far as the plan says which these are."""
        strategy, members = self._plan.strategy, self._plan.cluster.members or ()
        firsts = self._first_ranks()
        if len(members) > 1 and not strategy.replicas:
            return []  # any node may be of any of the groups
        by_group: dict[int, list[str]] = {}
        for rank, node in firsts.items():
            replica = Coordinates.of(rank, strategy).data // strategy.cp
            by_group.setdefault(strategy.group_of(replica), []).append(node.there)
        return list(by_group.values())

    def _found_places(self) -> Places:
        """Which nodes see one run folder."""
        doing = "looking for a shared folder"
        self.ask("leave_mark", doing=doing)
        seen = dict(enumerate(self.ask("marks", doing=doing)))
        self.ask("remove_mark", doing=doing)
        names = {node.key: node.name for node in self._nodes.values()}
        placed = shared_out(seen, names)
        ranks = {
            place: tuple(rank for rank in sorted(placed) if placed[rank] == place)
            for place in sorted(set(placed.values()))
        }
        # Nodes without ranks may have files, too: those of a crew that was larger.
        return Places(ranks, keys(known()), self._folders.run)

    def start(self, checkpoint: Path | None) -> int:
        """Let the ranks meet and get their state; the steps done. Raises as Worker.start."""
        if self._places is not None and checkpoint is not None:
            manifest = (checkpoint / "manifest.json").read_text()
            self.ask("receive", checkpoint.name, manifest, doing="starting", of_places=True)
        meeting = self.meeting_point()
        done: int = self.ask("start", meeting, checkpoint, self._places, doing="starting")[0]
        return done

    def _first_ranks(self) -> Mapping[int, Node]:
        """The first rank of every node."""
        firsts = {node.key: rank for rank, node in reversed(self._nodes.items())}
        return {rank: self._nodes[rank] for rank in sorted(firsts.values())}

    def _check_clock(self, rank: int, node: Node) -> None:
        before = time.time()
        there = self._one(rank, "clock", doing="looking at its machine")
        require_clock(node.there, before, there, time.time())

    def meeting_point(self) -> Any:
        """Where the ranks meet: of one node at a file in a folder that only this user may enter.

        It is among the files of Ray's session, so that a launch that is killed leaves none of its
        own. Ranks of several nodes meet at an actor on this node, with which the launch would end
        anyway.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        first, here = self._nodes.get(0), ray.get_runtime_context().get_node_id()
        if all(node == first for node in self._nodes.values()):
            if first is None or first.key == here:
                session = ray._private.worker._global_node.get_session_dir_path()
                ours = session if os.access(session, os.W_OK) else None
                self._meeting = Path(mkdtemp(prefix="bigplan-meeting-", dir=ours))
                return self._meeting / "addresses"
            return self._one(0, "meeting_point", doing="starting")
        from bigplan.launcher.meeting import Board

        self._board = (
            ray.remote(Board)
            .options(
                num_cpus=0,
                max_concurrency=16 * self._layout.ranks,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote()
        )
        return self._board

    def ask(
        self, method: str, *arguments: object, doing: str, of_places: bool = False
    ) -> list[Any]:
        """Call a method of every rank, or of the first `of_places`; results by rank.

        Raises the most telling rank's error, and LostError where one hangs.
        """
        allowed = Allowed.checking() if method == "preflight" else Allowed.elsewhere()
        if method == "step":
            allowed = Allowed.in_step(self._predicted, first=not self._stepped)
        saves = method == "close" or (method in ("step", "save") and any(arguments))
        if saves and self._places is not None:
            kept = tuple(path.name for path in checkpoints(self._folders.run))
            self.ask("keep_only", kept, doing=doing, of_places=True)
        self._heartbeat.begin()
        asked: Sequence[int] = range(self._layout.ranks)
        if of_places:
            assert self._places is not None
            asked = [ranks[0] for ranks in self._places.ranks.values()]
        called = {getattr(self._actors[rank], method).remote(*arguments): rank for rank in asked}
        results = self._collect(called, doing, allowed)
        self._stepped = self._stepped or method == "step"
        if self._places is not None and method == "step":
            for saved in (each for result in results for each in result.saved if not each.error):
                self._have(saved.path.name)
        elif self._places is not None and method == "save":
            self._have(results[0].name)
        return results

    def _have(self, step: str) -> None:
        """Have the manifest of a checkpoint here: it says which place has what."""
        if not (self._folders.run / FOLDER / step).exists():
            text = self._one(0, "manifest", step, doing="writing a checkpoint")
            receive(self._folders.run, step, text)

    def _one(self, rank: int, method: str, *arguments: object, doing: str) -> Any:
        """Call a method of one rank, which answers at once."""
        called = {getattr(self._actors[rank], method).remote(*arguments): rank}
        return self._collect(called, doing, Allowed.elsewhere())[0]

    def _collect(self, ranks: Mapping[Any, int], doing: str, allowed: Allowed) -> list[Any]:
        import ray

        results: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = list(ranks)
        while waiting:
            timeout = GRACE_SECONDS if failures else LOOK_SECONDS
            done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
            self._meanwhile()
            if not done and failures:
                break
            if not done:
                self._look_at_nodes(doing)
                self._heartbeat.look(allowed, doing)
                continue
            rank = ranks[done[0]]
            try:
                results[rank] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                failures.append(Failure(rank, error))
        if failures:
            raise told(failures, doing, self._nodes, cut_short(self._data))
        return [results[rank] for rank in sorted(results)]

    def _look_at_nodes(self, doing: str) -> None:
        """Raise NodeLostError where a quiet rank's node does not answer either."""
        quiet = self._heartbeat.quiet(QUIET_SECONDS)
        now = time.monotonic()
        if quiet and now - self._asked_nodes > QUIET_SECONDS:
            self._asked_nodes = now
            theirs = {rank: node for rank, node in self._nodes.items() if rank in quiet}
            if error := node_lost(theirs, doing):
                raise error

    def dismiss(self, *, head: bool = True) -> None:
        """Kill every actor; none outlives a launch. Without Ray's `head` this process would end."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._board is not None and head:
            ray.kill(self._board)
        if self._meeting is not None:
            rmtree(self._meeting, ignore_errors=True)
        if head:
            placing.remove(self._group)
