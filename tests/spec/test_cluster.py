from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.compute import Device, gemm_seconds
from bigplan.errors import InputError, RefusedError
from bigplan.graph.operators import Gemm
from bigplan.spec.catalog import (
    find_cluster,
    find_gpu,
    find_link,
    find_network,
    list_clusters,
    list_gpus,
    list_links,
    list_networks,
)
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.link import GpuLink
from bigplan.spec.part import MachinePart

GiB = 2**30
_ROOT = Path(__file__).resolve().parents[2]

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
    link = parse_document(_LINK, GpuLink)
    assert (link.bandwidth, link.latency, link.half_size) == (1e10, 1e-6, 10**6)


def test_every_number_needs_a_source() -> None:
    with pytest.raises(InputError, match="no source for latency; add under `sources`"):
        parse_document(_LINK.replace("  latency: datasheet\n", ""), GpuLink)
    with pytest.raises(InputError, match="no source for latency"):
        parse_document(_LINK.replace("  latency: datasheet\n", "  latency: ' '\n"), GpuLink)


def test_a_source_belongs_to_a_number() -> None:
    with pytest.raises(InputError, match=r"names 'latenzy', which is no number .* 'latency'"):
        parse_document(_LINK + "  latenzy: datasheet\n", GpuLink)


def told(block: MachinePart) -> bool:
    """Which kind of number each is comes first; a datasheet is named in words."""
    kinds = ("measured", "fitted to ", "published: ", "estimate: ", "NVIDIA ", "AMD ")
    return all(text.startswith(kinds) for text in block.sources.values())


@pytest.mark.parametrize("name", list_clusters())
def test_shipped_clusters_are_described_in_full(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.name == name
    assert cluster.description
    blocks = [getattr(cluster.group, part) for part in type(cluster.group).model_fields]
    assert all(told(block) for block in blocks if isinstance(block, MachinePart))


@pytest.mark.parametrize("name", list_clusters())
def test_a_shared_node_is_no_faster_than_its_parts(name: str) -> None:
    group = find_cluster(name).group
    for alone, node in (
        (group.pcie.host_to_device, group.pcie.node_host_to_device),
        (group.pcie.device_to_host, group.pcie.node_device_to_host),
    ):
        assert alone <= node <= alone * group.gpus_per_node
    # AdamW with a 16-bit copy moves 30 bytes a parameter of host memory (rates have two digits).
    assert 30 * group.host.adam_rate <= 1.02 * group.host.memory_bandwidth


@pytest.mark.parametrize("name", list_gpus())
def test_shipped_gpus_are_described_in_full(name: str) -> None:
    gpu = find_gpu(name)
    assert told(gpu)
    assert gpu.device == ("rocm" if gpu.name.startswith("AMD") else "cuda")
    assert gpu.peak("fp16") > gpu.peak("fp32")
    assert gpu.attention_forward_efficiency.keys() == gpu.attention_backward_efficiency.keys()
    # A fused AdamW streams about 30 bytes a parameter through device memory.
    rate = gpu.memory_bandwidth * gpu.memory_efficiency / 30
    if gpu.sources["adam_rate"].startswith("estimate"):  # measured, two kernels take longer
        assert gpu.adam_rate == pytest.approx(rate, rel=0.1)
    assert gpu.adam_rate <= 1.1 * rate


def test_half_lengths_of_attention() -> None:
    name = "attention_backward_half_length"
    source = {name: "measured"}
    gpu = find_gpu("rtx-4090")
    assert (gpu.attention_forward_half_length, gpu.attention_backward_half_length) == (None, None)
    assert "half_length" not in to_yaml(gpu)  # documents of before are written as before
    assert gpu.replaced({name: {"flash2": 0}}, source).attention_backward_half_length == {
        "flash2": 0.0
    }
    longer = gpu.replaced({name: {"flash2": 512}}, source)
    assert parse_document(to_yaml(longer), type(gpu)) == longer
    with pytest.raises(ValueError, match=f"no source for {name}"):
        gpu.replaced({name: {"flash2": 512}}, {})
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        gpu.replaced({name: {"flash2": -1}}, source)
    with pytest.raises(ValueError, match="names sdpa, for which attention_backward_efficiency"):
        gpu.replaced({name: {"sdpa": 512}}, source)


def test_volta_and_turing_know_no_bf16() -> None:
    without = {name for name in list_gpus() if "bf16" not in find_gpu(name).peak_flops}
    volta = {"v100-sxm2-16gb", "v100-sxm2-32gb", "v100-sxm3-32gb"}
    assert without == volta | {"t4", "rtx-2080-ti"}


@pytest.mark.parametrize("name", [*list_links(), *list_networks()])
def test_shipped_links_are_described_in_full(name: str) -> None:
    assert told(find_link(name) if name in list_links() else find_network(name))


def test_a_shipped_part_may_be_named_or_written_out() -> None:
    named = (_ROOT / "cluster_configs" / "dgx-h100.yaml").read_text()
    group = parse_document(named, Cluster).group
    assert group.gpu == find_gpu("h100-sxm-80gb")
    assert (group.intra_node, group.inter_node) == (
        find_link("nvlink4"),
        find_network("infiniband-ndr-8x400"),
    )
    written = to_yaml(find_cluster("dgx-h100"))
    assert "name: NVIDIA H100 80GB HBM3" in written  # the whole block: a plan stands alone
    assert parse_document(written, Cluster).group == group


@pytest.mark.parametrize(
    ("part", "wrong", "message"),
    [
        ("gpu: h100-sxm-80gb", "gpu: h100-80gb", "no GPU type is called 'h100-80gb'; did you mean"),
        (
            "intra_node: nvlink4",
            "intra_node: nvlink9",
            "no link inside a node is called 'nvlink9'; did",
        ),
        ("inter_node: inf", "inter_node: nvlink4 #", "no network is called 'nvlink4'"),
        ("gpu: h100-sxm-80gb", "gpu: 8", "`node_groups.0.gpu` is 8, which must be keys and values"),
    ],
)
def test_an_unknown_shipped_part_names_its_line(part: str, wrong: str, message: str) -> None:
    text = (_ROOT / "cluster_configs" / "dgx-h100.yaml").read_text()
    line = text[: text.index(part)].count("\n") + 1
    with pytest.raises(InputError) as caught:
        parse_document(text.replace(part, wrong), Cluster, "my.yaml")
    assert str(caught.value).startswith(f"my.yaml:{line}: ")
    assert message in str(caught.value)


def test_the_measured_machine() -> None:
    group = find_cluster("h200-1x").group
    assert (group.gpu.memory, group.host.memory) == (139 * GiB, 120 * GiB)
    assert (group.pcie.host_to_device, group.host.adam_rate) == (55e9, 4.7e9)
    # benchmarks/results/2026-11-21-h200-operators: two of the 28 products that set the curve.
    for gemm, measured in (
        (Gemm("product", 8192, 4096, 4096), 391.9e-6),
        (Gemm("product", 16384, 28672, 4096), 5638.9e-6),
    ):
        assert gemm_seconds(gemm, Device(group.gpu, "bf16")) == pytest.approx(measured, rel=0.1)


def test_peak_of_an_unknown_precision() -> None:
    with pytest.raises(
        InputError, match="Tesla T4 states no peak for bf16; use precision fp16, fp"
    ):
        find_gpu("t4").peak("bf16")
    with pytest.raises(InputError, match="states no peak for fp8; leave fp8_gemms off, or add fp8"):
        find_gpu("a100-sxm4-80gb").peak("fp8")


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
    assert (after.host.tensor_memory or after.host.memory) == min(host, before.host.memory)
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


def test_precisions_reach_one_share_of_their_peak_unless_stated() -> None:
    group = find_cluster("h200-1x").group
    shares = {group.gpu.gemm_share(precision) for precision in group.gpu.peak_flops}
    assert shares == {group.gpu.gemm_efficiency}


def test_a_replaced_number_needs_its_source() -> None:
    with pytest.raises(ValueError, match="no source for both_ways"):
        find_cluster("h200-1x").group.pcie.replaced({"both_ways": 98e9}, {})
