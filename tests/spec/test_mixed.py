"""Unlike nodes as equal ones: never better than any of them."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_cluster, find_network, list_clusters
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.files.document import parse_document, validate
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.mixed import choices, equal_nodes

GROUPS = {name: find_cluster(name).group for name in list_clusters()}
JOINABLE = [
    name for name, g in GROUPS.items() if g.inter_node is not None and g.gpu.device == "cuda"
]


def mixed(*names: str, **nodes: int) -> Cluster:
    groups = tuple(
        GROUPS[name].model_copy(update={"name": name, "nodes": nodes.get(name, 1)})
        for name in names
    )
    return Cluster(name="lab", node_groups=groups)


@given(st.lists(st.sampled_from(JOINABLE), min_size=2, max_size=4, unique=True))
def test_no_figure_is_better_than_any_groups(names: list[str]) -> None:
    groups = [GROUPS[name] for name in names]
    worst = equal_nodes(groups)
    assert worst.nodes == sum(group.nodes for group in groups)
    for group in groups:
        assert worst.gpus_per_node <= group.gpus_per_node
        _not_better(worst, group)


def _not_better(worst: NodeGroup, group: NodeGroup) -> None:
    ours, theirs = worst.gpu, group.gpu
    assert ours.memory <= theirs.memory
    assert ours.context_memory >= theirs.context_memory
    assert ours.adam_rate <= theirs.adam_rate
    streamed = [gpu.memory_bandwidth * gpu.memory_efficiency for gpu in (ours, theirs)]
    assert streamed[0] <= streamed[1] * (1 + 1e-9)
    assert set(ours.peak_flops) <= set(theirs.peak_flops)
    products = [gpu.peak("fp16") * gpu.gemm_share("fp16") for gpu in (ours, theirs)]
    assert products[0] <= products[1] * (1 + 1e-9)
    assert worst.host.memory <= group.host.memory
    assert worst.host.adam_rate <= group.host.adam_rate
    assert worst.host.numa_domains >= group.host.numa_domains
    assert worst.pcie.node_host_to_device <= group.pcie.node_host_to_device
    assert worst.intra_node.reached("all_gather") <= group.intra_node.reached("all_gather")
    assert worst.inter_node is not None
    assert group.inter_node is not None
    assert worst.inter_node.latency >= group.inter_node.latency
    # A message's rate, from whichever number of a node's GPUs sends one.
    for senders in range(1, worst.gpus_per_node + 1):
        mine, its = (
            network.reached("send") / network.parts(senders, worst.gpus_per_node)
            for network in (worst.inter_node, group.inter_node)
        )
        assert mine <= its
    if worst.nvme is not None:
        assert group.nvme is not None
        assert worst.nvme.node_read <= group.nvme.node_read
        assert worst.nvme.node_capacity <= group.nvme.node_capacity


def test_a_figure_that_one_group_leaves_out_counts_as_what_stands_for_it() -> None:
    host = GROUPS["dgx-h100"].host
    slow = host.replaced({"adam_rate": 1e9}, {"adam_rate": "test"})
    known = host.replaced({"adam_rate_beside_copies": 2e9}, {"adam_rate_beside_copies": "test"})
    groups = [GROUPS["dgx-h100"].model_copy(update={"host": each}) for each in (known, slow)]
    for order in (groups, groups[::-1]):
        assert equal_nodes(order).host.adam_rate_beside_copies == 1e9
    assert equal_nodes(groups).host.sources["adam_rate"].endswith(": test")


def test_cards_are_known_where_every_group_tells_them() -> None:
    silent = find_network("ethernet-800g")
    assert silent.nics is None
    one = find_network("ethernet-10g")
    for network, nics in ((silent, None), (find_network("infiniband-ndr-8x400"), 8), (one, 1)):
        groups = [GROUPS["dgx-h100"].model_copy(update={"inter_node": n}) for n in (network, one)]
        found = equal_nodes(groups).inter_node
        assert found is not None
        assert (found.nics, "nics" in found.sources) == (nics, nics is not None)
        assert found.bandwidth == one.bandwidth


def test_groups_alone_and_the_strongest_together() -> None:
    cluster = mixed("dgx-a100-80g", "dgx-h100", "rtx-4090-workstation", **{"dgx-a100-80g": 2})
    found = [tuple(m.name for m in choice.members or ()) for choice in choices(cluster)]
    # Two DGX A100 have less than one DGX H100; the workstation has no network.
    assert found == [
        ("dgx-h100",),
        ("dgx-a100-80g",),
        ("rtx-4090-workstation",),
        ("dgx-h100", "dgx-a100-80g"),
    ]
    last = choices(cluster)[-1]
    assert last.group.nodes == 3
    assert [m.name for m in last.left_out or ()] == ["rtx-4090-workstation"]
    assert parse_document(to_yaml(last), Cluster) == last


def test_one_group_is_itself() -> None:
    cluster = find_cluster("dgx-h100")
    assert choices(cluster) == (cluster,)


def test_gpus_of_two_makers_share_no_step() -> None:
    cluster = mixed("dgx-h100", "mi300x-8x")
    assert all(len(choice.members or ()) == 1 for choice in choices(cluster))


def test_prices_are_the_mean() -> None:
    groups = [g for g in GROUPS.values() if g.running is not None and g.running.price is not None]
    one, two = next(
        pair for pair in combinations(groups, 2) if all(g.inter_node is not None for g in pair)
    )
    assert one.running is not None
    assert two.running is not None
    prices = [float(running.price or 0) for running in (one.running, two.running)]
    both = equal_nodes([one.model_copy(update={"nodes": 3}), two]).running
    assert both is not None
    assert both.price == pytest.approx((3 * prices[0] + prices[1]) / 4)
    without = equal_nodes([one, two.model_copy(update={"running": None})])
    assert without.running is None


def test_a_number_of_nodes_is_refused() -> None:
    with pytest.raises(
        RefusedError, match=r"unlike nodes \(dgx-h100 and dgx-a100-80g\).*`nodes` of"
    ):
        mixed("dgx-h100", "dgx-a100-80g").with_nodes(4)


def test_two_groups_of_one_name_are_refused() -> None:
    group = GROUPS["dgx-h100"]
    with pytest.raises(InputError, match=r"several node groups named dgx-h100.*`name` of its own"):
        choices(Cluster(name="lab", node_groups=(group, group)))


LIKE = "name: lab\nnode_groups:\n  - {like: dgx-h100, %s}\n"


def test_a_group_may_be_like_a_shipped_cluster() -> None:
    (group,) = parse_document(LIKE % "nodes: 3, name: new, nvme: null", Cluster).node_groups
    assert (group.name, group.nodes, group.nvme) == ("new", 3, None)
    assert group.gpu == GROUPS["dgx-h100"].gpu
    (group,) = parse_document(LIKE % "gpu: h200-sxm", Cluster).node_groups
    assert (group.gpu.name, group.nodes) == ("NVIDIA H200", 1)


def test_figures_of_a_part_may_be_given_alone() -> None:
    drives = "nvme: {read: 7 GB/s, path: /fast}"
    given = f"host: {{memory: 120 GiB, cores: 16}}, {drives}, inter_node: {{nics: 1}}"
    (group,) = parse_document(LIKE % given, Cluster).node_groups
    usual = GROUPS["dgx-h100"]
    assert usual.nvme is not None
    assert group.nvme is not None
    assert usual.inter_node is not None
    assert group.inter_node is not None
    assert (group.host.memory, group.host.cores) == (120 * 2**30, 16)
    assert group.host.adam_rate == usual.host.adam_rate
    sources = usual.nvme.sources | {"read": group.nvme.sources["read"]}
    assert group.nvme == usual.nvme.model_copy(
        update={"read": 7e9, "path": "/fast", "sources": sources}
    )
    assert group.inter_node.bandwidth == usual.inter_node.bandwidth
    assert group.inter_node.nics == 1
    told = group.host.sources
    assert told["memory"].startswith("estimate: 120 GiB as stated, in place of: ")
    assert told["adam_rate"] == usual.host.sources["adam_rate"]


def test_a_source_of_such_a_figure_may_be_given() -> None:
    given = "gpu: {memory: 48 GiB, sources: {memory: measured here}}"
    (group,) = parse_document(LIKE % given, Cluster).node_groups
    usual = GROUPS["dgx-h100"].gpu
    assert group.gpu.sources == usual.sources | {"memory": "measured here"}
    assert group.gpu == usual.model_copy(
        update={"memory": 48 * 2**30, "sources": group.gpu.sources}
    )


def test_a_part_that_is_given_in_full_is_no_change_of_the_usual_one() -> None:
    other = GROUPS["dgx-a100-80g"].host
    data = {"name": "lab", "node_groups": [{"like": "dgx-h100", "host": other.model_dump()}]}
    assert validate(data, Cluster, "lab.yaml").node_groups[0].host == other


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("host: {memory: 12}", r"lab\.yaml:3: .*host\.memory.* is 12 B, which no machine has"),
        ("host: {memry: 1 GiB}", r"lab\.yaml:3: unknown key 'memry' in .*host`; did you mean"),
        (
            "nvme: {read: fast}",
            r"lab\.yaml:3: `node_groups\.0\.nvme\.read`: 'fast' is not a bandwidth",
        ),
        ("host: {cores: 2, sources: x}", r"lab\.yaml:3: `node_groups\.0\.host\.sources` is 'x'"),
        ("host: {cores: 2, sources: [1]}", r"lab\.yaml:3: `node_groups\.0\.host\.sources` is a"),
        ("nodes: two", r"lab\.yaml:3: `node_groups\.0\.nodes` is 'two', which must be a whole"),
        ("gpus: 4", r"lab\.yaml:3: unknown key 'gpus' in `node_groups\.0`; did you mean"),
        ("gpu: null", r"lab\.yaml:3: `node_groups\.0`: gpu: a group needs it; leave it out"),
    ],
)
def test_slips_in_such_a_group_are_told(keys: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_document(LIKE % keys, Cluster, "lab.yaml")


def test_an_unknown_cluster_to_be_like() -> None:
    text = (LIKE % "nodes: 1").replace("dgx-h100", "dgx-h10")
    with pytest.raises(InputError, match=r"no cluster is called 'dgx-h10'; did you mean"):
        parse_document(text, Cluster, "lab.yaml")
