"""A Ray cluster of several nodes on this machine, and workers to whom things happen on the way.

Every node has an address of its own on loopback, and processes of its own. The head has no cores:
the launch is connected to it, and would end with it.
"""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from bigplan.engines import make_plan
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.runtime.checkpoint.saver import Saver
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.result import StepResult
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.catalog import find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.link import Network
from bigplan.spec.training import Training
from tests.launcher.warm import forked
from tests.runtime.harness import Run, execute
from tests.runtime.processes import start
from tests.tiny import small_cluster

CORES = 2  # of a node
PATIENCE = 60.0  # seconds for something to happen
Act = Callable[[], object]


def two_nodes(devices: int = CORES) -> Cluster:
    """Two of the small nodes, of so many devices each, beside each other."""
    group = small_cluster(devices).group
    network = Network.model_validate(group.intra_node.model_dump(exclude={"peer_access"}))
    wide = group.model_copy(update={"inter_node": network})
    return Cluster(name="two", node_groups=(wide,)).with_nodes(2)


@cache
def plan_of(steps: int, nodes: int = 2, devices: int = CORES, **pins: str | int | float) -> Plan:
    """tiny-llama-test in fp32 over the nodes, of so many devices each."""
    training = Training(sequence_length=32, global_batch=4, precision="fp32", steps=steps)
    cluster = two_nodes(devices).with_nodes(nodes)
    return make_plan(Request(find_model("tiny-llama-test"), training, cluster, pins, "native"))


@dataclass
class Machines:
    """Nodes by name."""

    cluster: Any  # ray.cluster_utils.Cluster
    nodes: dict[str, Any] = field(default_factory=dict)
    # What a node's processes find in their environment, by its name.
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    # Ray lets the kernel end a node's processes with the thread that started them.
    starter: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str) -> None:
        """A node, as it comes back after it was lost."""
        self.nodes[name] = self.starter.submit(self._started, name).result()

    def _started(self, name: str) -> Any:
        # Ray wants to handle a signal, which threads may not.
        with mock.patch("ray._private.utils.set_sigterm_handler"):
            return self.cluster.add_node(
                node_ip_address=f"127.0.0.{3 + 'ab'.index(name)}",
                node_name=name,
                num_cpus=CORES,
                resources={name: 1},  # as nodes say of which group they are
                include_dashboard=False,
                object_store_memory=80 << 20,
                env_vars=dict(self.variables.get(name, {})),
            )

    def lose(self, name: str) -> None:
        """All its processes are killed at once."""
        node = self.nodes.pop(name)
        (raylet,) = node.all_processes["raylet"]
        theirs = [*children(raylet.process.pid), *forked(raylet.process.pid)]
        self.cluster.remove_node(node, allow_graceful=False)
        for process in theirs:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = status.read_text().rpartition(")")[2].split()
        except OSError:  # ended
            continue
        if int(after_name[1]) == process:
            found.append(int(status.parent.name))
    return found


def train(rank: int, folder: str) -> None:
    """A rank without Ray: the plan in the folder, once for each of its numbers of steps."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = Path(folder)
    plan, lengths = pickle.loads((path / "asked").read_bytes())
    runs = [
        execute(plan, rank=rank, meeting=path / f"{steps}.meeting", steps=steps, looks=False)
        for steps in lengths
    ]
    if rank == 0:
        (path / "runs").write_bytes(pickle.dumps(runs))


def uninterrupted(folder: Path, plan: Plan, lengths: Sequence[int]) -> list[Run]:
    """What a plan computes in so many steps, and in so many others, by ranks without Ray."""
    (folder / "asked").write_bytes(pickle.dumps((plan, lengths)))
    start(train, folder, plan.strategy.ranks)
    runs: list[Run] = pickle.loads((folder / "runs").read_bytes())
    return runs


@contextmanager
def machines(variables: Mapping[str, Mapping[str, str]] | None = None) -> Iterator[Machines]:
    """A head, and the nodes a and b with these variables.

    The head has a list of launches of its own: on the tests' are those that others kill.
    """
    from ray.cluster_utils import Cluster as Nodes

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with TemporaryDirectory() as state:
        head = {
            "node_ip_address": "127.0.0.2",
            "num_cpus": 0,
            "include_dashboard": False,
            "no_monitor": True,
            "object_store_memory": 80 << 20,
            "env_vars": {"XDG_STATE_HOME": state},
        }
        made = Machines(Nodes(initialize_head=True, head_node_args=head), variables=variables or {})
        try:
            made.add("a")
            made.add("b")
            yield made
        finally:
            made.cluster.shutdown()
            made.starter.shutdown()


class Scripted(NativeWorker):
    """A worker that stands still before some steps until something has happened elsewhere.

    The script says before which step, of a crew of how many ranks, what happens once; a negative
    one is the number of steps after which a crew starts again.
    """

    folder = Path()
    script: tuple[tuple[int, int, str], ...] = ()
    held_up: tuple[int, ...] = ()  # steps whose checkpoints stay under way

    def start(self, meeting: Any, resume: Path | None = None, apart: Apart | None = None) -> int:
        done = super().start(meeting, resume, apart)
        self.await_(-done)
        return done

    def step(self, checkpoint: Path | None = None) -> StepResult:
        """A checkpoint ends in the step that begins it, whatever the drive has to do, or does not.

        Otherwise it may end in the step after, and whether a node that is lost between the two
        takes it along is chance.
        """
        self.await_(self._steps + 1)
        if self._steps + 1 in self.held_up:
            with mock.patch.object(Saver, "ended", new=False):
                return super().step(checkpoint)
        result = super().step(checkpoint)
        written = self._running().background.ended(wait=True)
        return replace(result, saved=(*result.saved, *written))

    def await_(self, step: int) -> None:
        for when, ranks, name in self.script:
            if (when, ranks) == (step, self._plan.strategy.ranks):
                (self.folder / f"{name}.begin-{self._rank}").write_text(str(os.getpid()))
                while not (self.folder / f"{name}.done").exists():
                    time.sleep(0.01)


@contextmanager
def happening(
    folder: Path, acts: Mapping[str, Callable[[Mapping[int, int]], object]]
) -> Iterator[None]:
    """Let things happen, each once all ranks of a crew wait for it; told are their processes."""
    script = {name: ranks for _, ranks, name in Scripted.script}
    ended, failed = threading.Event(), list[Exception]()

    def watch() -> None:
        left = dict(acts)
        while left and not ended.is_set():
            for name in list(left):
                begun = {
                    int(p.suffix[7:]): int(p.read_text() or 0)
                    for p in folder.glob(f"{name}.begin-*")
                }
                if len(begun) == script[name] and all(begun.values()):
                    try:
                        left.pop(name)(begun)
                    except Exception as error:  # noqa: BLE001 -- told below, whatever it is
                        failed.append(error)
                    (folder / f"{name}.done").touch()
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE)
    assert not failed, failed
