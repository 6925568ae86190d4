"""Changes are chosen by what binds a plan, and solved, not guessed."""

from dataclasses import replace
from functools import cache

import pytest

from bigplan import whatif
from bigplan.errors import InfeasibleError
from bigplan.plan import MemoryUse, Plan
from bigplan.planner import Request, make_plan
from bigplan.program import Lane
from bigplan.solve.search import Watch
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import MOST_NODES, Cluster
from bigplan.spec.training import Training
from bigplan.whatif import FULL, Outcome, helps, what_would_help

GIB = 2**30


def request_on(cluster: Cluster) -> Request:
    training = Training(sequence_length=32, global_batch=64)
    return Request(find_model("tiny-llama-test"), training, cluster)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    """The clusters that are asked for; every one of them makes the plan no faster."""
    clusters: list[Cluster] = []

    def remember(request: Request, watch: Watch) -> Plan:
        clusters.append(request.cluster)
        return plan_with({}, {})

    monkeypatch.setattr(whatif, "make_plan", remember)
    return clusters


@cache
def a_plan() -> Plan:
    return make_plan(request_on(find_cluster("dgx-h100")))


def plan_with(path: dict[Lane, float], used: dict[str, float]) -> Plan:
    """A plan of one second whose critical path and full tiers are as told."""
    memory = tuple(
        MemoryUse.model_validate(
            {
                "stage": 0,
                "tier": tier,
                "scope": "node",
                "used_bytes": int(1000 * share),
                "capacity_bytes": 1000,
                "by_purpose": {},
            }
        )
        for tier, share in used.items()
    )
    update = {"step_seconds": 1.0, "critical_path": path, "memory": memory}
    return a_plan().model_copy(update={"predicted": a_plan().predicted.model_copy(update=update)})


def asked(plan: Plan | None, cluster: Cluster | None = None) -> list[str]:
    request = request_on(cluster or find_cluster("dgx-h100").with_nodes(2))
    return [outcome.change for outcome in what_would_help(request, plan).outcomes]


NODES = ["one more node (24 GPUs)", "twice the nodes (32 GPUs)"]


@pytest.mark.parametrize(
    ("path", "used", "changes"),
    [
        ({Lane.COMPUTE: 0.9}, {"gpu": 0.99}, []),
        ({Lane.COMPUTE: 0.9}, {"host": 0.99}, ["64 GiB more host memory per node"]),
        (
            {Lane.NVME_WRITE: 0.9},
            {},
            ["one more NVMe drive per node", "twice the NVMe drives per node"],
        ),
        (
            {Lane.NVME_WRITE: 0.01},
            {"nvme": 0.99},
            ["one more NVMe drive per node", "twice the NVMe drives per node"],
        ),
        ({Lane.CPU: 0.9}, {}, ["twice the CPU cores and memory channels"]),
        ({Lane.H2D: 0.04, Lane.D2H: 0.04}, {}, ["twice the PCIe bandwidth"]),
        ({Lane.H2D: 0.9}, {}, ["twice the PCIe bandwidth"]),
        ({Lane.COMM: 0.9}, {}, ["twice the network bandwidth between nodes"]),
        ({Lane.COMM: 0.01, Lane.H2D: 0.01}, {"host": FULL - 0.01}, []),
    ],
)
def test_what_binds_decides_what_is_asked(
    solved: list[Cluster], path: dict[Lane, float], used: dict[str, float], changes: list[str]
) -> None:
    assert asked(plan_with(path, used)) == [*changes, *NODES]
    assert len(solved) == len(changes) + 2


def test_each_change_changes_what_it_says(solved: list[Cluster]) -> None:
    every = dict.fromkeys(Lane, 0.9)
    asked(plan_with(every, {"host": 1.0}))
    before = find_cluster("dgx-h100").group
    one, two, memory, cpu, pcie, network, more, twice = (cluster.group for cluster in solved)
    assert before.nvme is not None
    assert one.nvme == before.nvme.model_copy(update={"drives": before.nvme.drives + 1})
    assert two.nvme == before.nvme.model_copy(update={"drives": 2 * before.nvme.drives})
    assert memory.host.memory == before.host.memory + 64 * GIB
    assert cpu.host.adam_rate == 2 * before.host.adam_rate
    assert cpu.host.memory == before.host.memory
    assert pcie.pcie.node_host_to_device == 2 * before.pcie.node_host_to_device
    # What is not stated stays so: it follows from the others.
    assert cpu.host.adam_rate_beside_copies is None
    assert pcie.pcie.both_ways is None
    assert network.inter_node is not None
    assert before.inter_node is not None
    assert network.inter_node.bandwidth == 2 * before.inter_node.bandwidth
    assert (more.nodes, twice.nodes) == (3, 4)
    assert more.gpu == before.gpu


def test_every_rate_of_a_measured_network_is_twice_as_high(solved: list[Cluster]) -> None:
    cluster = find_cluster("dgx-h100").with_nodes(2)
    measured = {"send_bandwidth": 3e9, "all_gather_bandwidth": 5e9}
    assert cluster.group.inter_node is not None
    network = cluster.group.inter_node.replaced(measured, dict.fromkeys(measured, "test"))
    group = cluster.group.model_copy(update={"inter_node": network})
    asked(plan_with({Lane.COMM: 0.9}, {}), cluster.model_copy(update={"node_groups": (group,)}))
    twice = solved[0].group.inter_node
    assert twice is not None
    assert (twice.reached("send"), twice.reached("all_gather")) == (6e9, 10e9)
    assert twice.bandwidth == 2 * network.bandwidth


def test_without_a_network_it_is_another_gpu(solved: list[Cluster]) -> None:
    changes = asked(plan_with({}, {}), find_cluster("rtx-4090-workstation"))
    assert changes == ["one more GPU in the node"]
    assert solved[0].group.gpus_per_node == 2


def test_a_better_machine_never_slows_the_plan_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search of the better machine ends at a slower plan, the known one counts."""
    real = a_plan().predicted
    bound_by_pcie = real.model_copy(update={"critical_path": {Lane.H2D: real.step_seconds}})
    plan = a_plan().model_copy(update={"predicted": bound_by_pcie})
    monkeypatch.setattr(whatif, "make_plan", lambda _request, _watch: plan_with({}, {}))
    pcie, *gpus = what_would_help(request_on(a_plan().cluster), plan).outcomes
    assert pcie.change == "twice the PCIe bandwidth"
    assert real.step_seconds < 1.0  # of the plan that the search gives here
    assert pcie.step_seconds is not None
    assert pcie.step_seconds <= real.step_seconds
    assert [outcome.step_seconds for outcome in gpus] == [1.0]  # the plan uses none of them


def test_no_more_nodes_are_asked_for_than_a_cluster_may_have(solved: list[Cluster]) -> None:
    plan, dgx = plan_with({}, {}), find_cluster("dgx-h100")
    assert asked(plan, dgx.with_nodes(MOST_NODES)) == []
    assert asked(plan, dgx.with_nodes(MOST_NODES - 1)) == [f"one more node ({8 * MOST_NODES} GPUs)"]
    assert [cluster.nodes for cluster in solved] == [MOST_NODES]


def test_there_may_be_no_time(solved: list[Cluster]) -> None:
    request = request_on(find_cluster("dgx-h100").with_nodes(2))
    answer = what_would_help(request, plan_with({Lane.H2D: 0.9}, {}), lambda: len(solved) < 1)
    assert [outcome.change for outcome in answer.outcomes] == ["twice the PCIe bandwidth"]
    assert answer.unasked == ("one more node (24 GPUs)",)


def test_a_search_that_was_stopped_is_no_answer() -> None:
    request = request_on(find_cluster("dgx-h100"))
    answer = what_would_help(request, a_plan(), watch=lambda best, bound, left: False)
    assert answer.outcomes == ()
    assert answer.unasked == ("one more node (16 GPUs)",)


def test_more_gpus_are_solved_for_and_help() -> None:
    request = request_on(find_cluster("dgx-h100"))
    request = replace(request, model=find_model("tiny-llama-demo"))
    plan = make_plan(request)
    outcomes = what_would_help(request, plan).outcomes
    assert [outcome.change for outcome in outcomes] == ["one more node (16 GPUs)"]
    (outcome,) = outcomes
    again = make_plan(replace(request, cluster=request.cluster.with_nodes(2)))
    assert outcome.before_seconds == plan.predicted.step_seconds
    assert outcome.step_seconds == again.predicted.step_seconds
    assert outcome.factor == pytest.approx(
        plan.predicted.step_seconds / again.predicted.step_seconds
    )


def test_where_nothing_fits_memory_and_nodes_are_asked_until_it_does() -> None:
    cluster = find_cluster("dgx-h100").with_caps(gpu=4 * GIB, host=40 * GIB, nvme=0)
    request = replace(request_on(cluster), model=find_model("llama-3-8b"))
    request = replace(request, settings={"recompute": "full", "tp": 8, "micro_batch": 1})
    with pytest.raises(InfeasibleError):
        make_plan(request)
    outcomes = what_would_help(request, None).outcomes
    memory, *nodes = outcomes
    assert memory.change == "64 GiB more host memory per node"
    assert memory.before_seconds is None
    assert all(outcome.change.split()[1] == "nodes" for outcome in nodes)
    assert not any(map(helps, nodes[:-1]))


def test_a_change_that_cannot_be_planned_says_why() -> None:
    request = request_on(find_cluster("dgx-h100"))
    model = request.model.model_copy(update={"layers": 1})  # for one stage
    request = replace(request, model=model, settings={"dp": 8, "tp": 1})
    (outcome,) = what_would_help(request, make_plan(request)).outcomes
    assert outcome.step_seconds is None
    assert outcome.factor is None
    assert "dp=8" in outcome.reason
    assert not helps(outcome)


def test_helping_means_faster_by_more_than_two_searches_differ() -> None:
    assert helps(Outcome("x", 2.0, 1.0))
    assert not helps(Outcome("x", 1.0, 0.995))
    assert not helps(Outcome("x", 1.0, 1.1))
    assert helps(Outcome("x", None, 9.0))
