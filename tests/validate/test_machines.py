from __future__ import annotations

import pytest

from bigplan.spec.catalog import find_cluster
from bigplan.spec.gpu import find_gpu
from bigplan.spec.link import find_link, find_network
from bigplan.validate.machines import (
    MACHINES,
    NOMINAL_NETWORK,
    UnknownMachineError,
    machine_of,
)
from bigplan.validate.rows import read_rows
from tests.validate.rows import row


@pytest.mark.parametrize(
    ("gpu", "shipped", "per_node"),
    [
        ("A100-80GB", "a100-sxm4-80gb", 8),
        ("A100", "a100-sxm4-80gb", 8),
        ("A100-SXM-40GB", "a100-sxm4-40gb", 8),
        ("A100-SXM-64GB", "a100-sxm-64gb", 4),
        ("A100-PCIe-40GB", "a100-pcie-40gb", 8),
        ("H100-80GB", "h100-sxm-80gb", 8),
        ("H100-96GB-HBM2e(500W)", "h100-sxm-96gb-hbm2e", 8),
        ("H100-SXM-64GB (custom)", "h100-sxm-64gb-hbm2e", 4),
        ("H100-PCIe-80GB", "h100-pcie-80gb", 8),
        ("H100-NVL-94GB", "h100-nvl-94gb", 8),
        ("A40-48GB", "a40", 4),
        ("A800-80GB", "a100-sxm4-80gb", 8),
        ("H800", "h100-sxm-80gb", 8),
        ("H200", "h200-sxm", 8),
        ("B200", "b200", 8),
        ("GB200", "gb200", 16),  # 64, one NVLink domain, but no more than the run has
        ("GB300", "gb300", 16),
        ("V100-32GB", "v100-sxm2-32gb", 4),
        ("V100-16GB", "v100-sxm2-16gb", 4),
        ("V100-SXM3-32GB", "v100-sxm3-32gb", 16),
        ("RTX3090", "rtx-3090", 4),
        ("RTX 3090 Ti", "rtx-3090-ti", 4),
        ("RTX3080-10GB", "rtx-3080", 4),
        ("RTX 2080 Ti", "rtx-2080-ti", 4),
        ("RTX4090", "rtx-4090", 8),
        ("RTX 4080", "rtx-4080", 8),
        ("RTX 5080", "rtx-5080", 8),
        ("A5000", "rtx-a5000", 4),
        ("A6000-Ada", "rtx-6000-ada", 2),
        ("RTX-6000-Ada", "rtx-6000-ada", 2),
        ("A6000", "rtx-a6000", 4),
        ("RTX-PRO-6000-Blackwell", "rtx-pro-6000", 8),
        ("RTX 5090", "rtx-5090", 8),
        ("L40S", "l40s", 8),
        ("L40", "l40", 8),
        ("A10", "a10", 8),
        ("GH200-96GB", "gh200-96gb", 4),
        ("L4", "l4", 8),
        ("T4", "t4", 8),
        ("A10G", "a10g", 8),
        ("MI300X-192GB", "mi300x", 8),
        ("MI325X", "mi325x", 8),
        ("AMD Instinct MI350X", "mi350x", 8),
        ("MI355X-288GB", "mi355x", 8),
        ("H20-96GB", "h20", 8),
    ],
)
def test_gpus_and_their_usual_nodes(gpu: str, shipped: str, per_node: int) -> None:
    nodes = machine_of(row(gpu=gpu, n_gpus=16))
    assert nodes.gpu == find_gpu(shipped)
    assert nodes.gpus_per_node == per_node
    assert nodes.nodes * per_node == 16


def test_every_shipped_row_has_a_machine() -> None:
    for one in read_rows():
        if one.n_gpus:
            assert machine_of(one).gpus >= one.n_gpus
    assert {machine.gpu for machine in MACHINES} >= {"a100-sxm4-80gb", "h100-sxm-80gb"}


@pytest.mark.parametrize(
    "gpu",
    [
        "MI250X",
        "RTX 6000",
        "GTX 4090",
        "XH100",
        "6000",
        "RTX 4080 SUPER",
        "RTX 3080 Ti",
    ],
)
def test_a_gpu_without_a_description_is_named_and_never_taken_for_another(gpu: str) -> None:
    with pytest.raises(UnknownMachineError, match=f"no description of a {gpu}"):
        machine_of(row(gpu=gpu))


def test_products_in_fp32_that_ran_in_tf32_have_its_peak() -> None:
    plain, tf32 = (machine_of(row(gpu="GH200-96GB", notes=n)).gpu for n in ("", "ran in TF32"))
    assert tf32.peak("fp32") == plain.peak("tf32") > plain.peak("fp32")
    assert machine_of(row(gpu="GH200-96GB", notes="fp32 without TF32")).gpu == plain
    card = find_gpu("rtx-5090")
    tf32 = machine_of(row(gpu="RTX 5090", notes="ran in TF32")).gpu
    assert tf32.gemm_share("fp32") == card.gemm_share("tf32") > card.gemm_share("fp32")
    assert tf32.gemm_share("bf16") == card.gemm_share("bf16")


def test_a_machine_whose_own_products_are_told_has_their_rate() -> None:
    told = "this machine's own GEMM table (2250 TFLOPS nominal) shows 0.45-0.50 of nominal at most"
    plain, slow = (machine_of(row(gpu="B200", notes=n)).gpu for n in ("", told))
    assert slow.gemm_efficiency == pytest.approx(0.475)
    assert slow == plain.model_copy(update={"gemm_efficiency": slow.gemm_efficiency})


def test_dgx_2_has_sixteen_v100s() -> None:
    assert machine_of(row(gpu="V100-32GB", gpus_per_node=16)).gpu == find_gpu("v100-sxm3-32gb")


@pytest.mark.parametrize(
    ("text", "nominal", "nics"),
    [
        ("800 Gb/s per node", 100e9, None),
        ("8x200 Gb/s HDR", 200e9, 8),
        ("8 x 400 Gb/s NDR", 400e9, 8),
        ("100 Gbps", 12.5e9, None),
        ("25 GB/s per GPU", 8 * 25e9, None),
        ("InfiniBand HDR 200 Gb/s", 8 * 25e9, None),  # a port for each GPU
        ("Slingshot 200 Gb/s per node", 25e9, None),
    ],
)
def test_a_stated_network_reaches_the_share_of_its_nominal_rate(
    text: str, nominal: float, nics: int | None
) -> None:
    usual = find_network("infiniband-hdr-8x200")
    found = machine_of(row(inter_node=text)).inter_node
    assert found is not None
    assert found.bandwidth == pytest.approx(nominal * usual.bandwidth / NOMINAL_NETWORK)
    assert (found.latency, found.half_size) == (usual.latency, usual.half_size)
    assert found.nics == nics


def test_two_cards_on_a_board_that_halves_the_lanes_are_in_a_desktop() -> None:
    desktop = find_cluster("rtx-4090x2-workstation").group
    text = {"gpu": "RTX 3090 Ti", "notes": "two cards on PCIe 4.0 x8, bridged by NVLink"}
    halved = machine_of(row(**text))
    assert halved.pcie == desktop.pcie
    assert halved.gpu == find_gpu("rtx-3090-ti")
    assert halved.intra_node == find_link("pcie4-x8-through-host")
    bridged = machine_of(row(**text, intra_node="NVLink bridge (NV4)"))
    assert bridged.intra_node == find_link("nvlink3-bridge")
    assert machine_of(row(gpu="RTX 3090 Ti")).pcie != desktop.pcie


def test_links_that_are_described_are_taken() -> None:
    nodes = machine_of(row(intra_node="NVLink 3, 4 links", inter_node="OmniPath 4 x 100 Gb/s"))
    assert nodes.intra_node == find_link("nvlink3-4-links")
    assert nodes.inter_node == find_network("omni-path-4x100")
    for text in ("InfiniBand", "0 Gb/s", "0 x 100 Gb/s"):
        assert machine_of(row(inter_node=text)).inter_node == find_network("infiniband-hdr-8x200")
    bridged = machine_of(row(gpu="A6000", intra_node="NVLink bridge (NV4)"))
    assert bridged.intra_node == find_link("nvlink3-bridge")
    assert machine_of(row(gpu="A800")).intra_node == find_link("nvlink3-8-links")
    assert machine_of(row(gpu="H800")).intra_node == find_link("nvlink4-8-links")
    usual = machine_of(row())
    assert usual.inter_node == find_network("infiniband-hdr-8x200")
    assert usual.intra_node == find_link("nvlink3")
