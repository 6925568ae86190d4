import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_cluster, list_clusters
from bigplan.spec.cluster import Cluster, Link, caps_from
from bigplan.spec.document import parse_document
from bigplan.spec.dump import to_yaml

GiB = 2**30

_LINK = """
name: wire
bandwidth: 10 GB/s
latency: 1 us
half_size: 1 MB
sources:
  bandwidth: datasheet
  latency: datasheet
  half_size: datasheet
"""


def test_si_inside() -> None:
    link = parse_document(_LINK, Link)
    assert (link.bandwidth, link.latency, link.half_size) == (1e10, 1e-6, 10**6)


def test_every_number_needs_a_source() -> None:
    with pytest.raises(InputError, match="no source for latency; add under `sources`"):
        parse_document(_LINK.replace("  latency: datasheet\n", ""), Link)
    with pytest.raises(InputError, match="no source for latency"):
        parse_document(_LINK.replace("  latency: datasheet\n", "  latency: ' '\n"), Link)


def test_a_source_belongs_to_a_number() -> None:
    with pytest.raises(InputError, match=r"names 'latenzy', which is no number .* 'latency'"):
        parse_document(_LINK + "  latenzy: datasheet\n", Link)


@pytest.mark.parametrize("name", list_clusters())
def test_shipped_clusters_are_described_in_full(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.name == name
    assert cluster.description
    gpu = cluster.group.gpu
    assert gpu.peak("bf16") >= gpu.peak("fp32")
    # Which kind of number it is comes first; a datasheet is named in words.
    kinds = ("measured", "published: ", "estimate: ", "NVIDIA ")
    blocks = [getattr(cluster.group, part) for part in type(cluster.group).model_fields]
    for block in blocks:
        for text in getattr(block, "sources", {}).values():
            assert text.startswith(kinds)


def test_the_measured_machine() -> None:
    group = find_cluster("h200-1x").group
    assert (group.gpu.memory, group.host.memory) == (139 * GiB, 120 * GiB)
    assert (group.pcie.host_to_device, group.host.adam_rate) == (55e9, 4.15e9)
    k = 4096
    reached = group.gpu.peak("bf16") * group.gpu.gemm_efficiency * k / (k + group.gpu.gemm_half_k)
    assert reached == pytest.approx(653e12, rel=0.01)  # mean of 647, 638 and 676 TFLOP/s


def test_peak_of_an_unknown_precision() -> None:
    with pytest.raises(InputError, match="states no peak for fp8; use one of bf16, fp16, fp32"):
        find_cluster("h200-1x").group.gpu.peak("fp8")


def test_with_nodes() -> None:
    cluster = find_cluster("dgx-h100")
    four = cluster.with_nodes(4)
    assert (cluster.gpus, four.gpus, four.nodes) == (8, 32, 4)
    assert four.with_nodes(1) == cluster
    with pytest.raises(InputError, match="nodes is 0"):
        cluster.with_nodes(0)
    with pytest.raises(InputError, match="describes no network between nodes"):
        find_cluster("h200-1x").with_nodes(2)


@given(st.integers(1, 2**50), st.integers(1, 2**50), st.integers(0, 2**50))
def test_caps_only_take_away(gpu: int, host: int, nvme: int) -> None:
    before = find_cluster("dgx-a100-80g").group
    after = find_cluster("dgx-a100-80g").with_caps(gpu=gpu, host=host, nvme=nvme).group
    assert after.gpu.memory == min(gpu, before.gpu.memory)
    assert after.host.memory == min(host, before.host.memory)
    assert before.nvme is not None
    left = after.nvme.node_capacity if after.nvme else 0
    assert left <= min(nvme, before.nvme.node_capacity)
    assert left > min(nvme, before.nvme.node_capacity) - before.nvme.drives


def test_caps_say_so_in_the_source() -> None:
    group = find_cluster("h200-1x").with_caps(gpu=16 * GiB).group
    assert group.gpu.sources["memory"].startswith("capped at 16 GiB on request (of 139 GiB")
    assert find_cluster("h200-1x").with_caps() == find_cluster("h200-1x")
    assert find_cluster("h200-1x").with_caps(nvme=0).group.nvme is None


def test_bad_caps() -> None:
    with pytest.raises(InputError, match="cap host is 0"):
        find_cluster("h200-1x").with_caps(host=0)
    with pytest.raises(InputError, match="unknown tier 'hots'; did you mean 'host'"):
        caps_from({"hots": 1})
    assert caps_from({"gpu": 3}) == {"gpu": 3, "host": None, "nvme": None}


def test_node_groups_are_held_but_not_planned_together() -> None:
    a, b = find_cluster("h200-1x").group, find_cluster("rtx-4090-workstation").group
    mixed = Cluster(name="mixed", node_groups=(a, b))
    assert (mixed.gpus, mixed.nodes) == (2, 2)
    with pytest.raises(RefusedError, match=r"mixes node groups \(h200, workstation\)"):
        _ = mixed.group


def test_several_nodes_need_a_network() -> None:
    group = find_cluster("h200-1x").group
    with pytest.raises(ValueError, match="has 2 nodes but no inter_node link"):
        type(group).model_validate(group.model_dump() | {"nodes": 2})


def test_one_wrong_number_deep_in_a_cluster_is_one_problem() -> None:
    text = to_yaml(find_cluster("rtx-4090-workstation"))
    assert "cores: 16" in text
    with pytest.raises(InputError) as caught:
        parse_document(text.replace("cores: 16", "cores: many"), Cluster, "my.yaml")
    (line,) = str(caught.value).splitlines()
    assert "node_groups.0.host.cores` is 'many'" in line


def test_a_cluster_without_nodes_is_told_so() -> None:
    with pytest.raises(InputError, match=r"`node_groups` is a list, which is too short"):
        parse_document("name: nothing\nnode_groups: []\n", Cluster, "my.yaml")
