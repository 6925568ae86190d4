"""The machine a row ran on: the shipped node of its GPU, with the links the row states."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from bigplan.spec import catalog
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.link import GpuLink, Network
from bigplan.validate.rows import PublishedRow

# In a row's notes: what a table of the machine's own products reaches, beside the peak.
OWN_PRODUCTS = re.compile(r"\bGEMM table\b.*?\b(0?\.\d+)-(0?\.\d+) of nominal")

TF32 = re.compile(r"(?<!without )(?<!no )\bTF32\b")  # in a row's notes: products of fp32 take it
OLD_BOARD = "older motherboard"  # in a row's notes: two cards share the lanes of a desktop's CPU

# In a row's notes: a desktop whose board halves the lanes between two cards.
HALF_LANES, DESKTOP = "PCIe 4.0 x8", "rtx-4090x2-workstation"

find_cluster = cache(catalog.find_cluster)  # hundreds of rows ran on a few kinds of machines
find_gpu = cache(catalog.find_gpu)
find_link, find_network = cache(catalog.find_link), cache(catalog.find_network)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a row's `gpu` means: a shipped cluster, and the GPU, which may be another variant."""

    pattern: str  # of the row's `gpu`
    cluster: str
    gpu: str
    gpus_per_node: int = 8
    link: str = ""  # inside a node, where it is not the cluster's
    network: str = ""  # between nodes, as a row would state it, where it is not the cluster's


# A rack of GB200 or GB300 has one NVLink domain, and a ConnectX-7 for each GPU (NVIDIA's data sheet
# of the GB200 NVL72), where hgx-b200 has eight a node.
PORT_EACH = "InfiniBand NDR, 400 Gb/s per GPU"

MACHINES = (
    Machine(r"^GH200", "gh200-4x", "gh200-96gb", 4),
    Machine(r"^RTX.?PRO.?6000", "rtx-pro-6000x8-server", "rtx-pro-6000"),
    Machine(r"^(RTX.?)?5090", "rtx-5090-workstation", "rtx-5090"),
    Machine(r"^L40S", "l40s-8x", "l40s"),
    Machine(r"^L40\b", "l40s-8x", "l40"),
    Machine(r"^(RTX.?)?A6000(?!.*Ada)", "rtx-a6000x4-workstation", "rtx-a6000", 4),
    Machine(r"^A40\b", "rtx-a6000x4-workstation", "a40", 4),
    Machine(r"^A800", "dgx-a100-80g", "a100-sxm4-80gb", link="nvlink3-8-links"),
    Machine(r"^H800", "dgx-h100", "h100-sxm-80gb", link="nvlink4-8-links"),
    Machine(r"^A100.*PCIe.*40", "dgx-a100-40g", "a100-pcie-40gb", link="pcie4-through-host"),
    Machine(r"^A100.*PCIe", "dgx-a100-80g", "a100-pcie-80gb", link="pcie4-through-host"),
    Machine(r"^A100.*64", "dgx-a100-80g", "a100-sxm-64gb", 4, link="nvlink3-4-links"),
    Machine(r"^A100.*40", "dgx-a100-40g", "a100-sxm4-40gb"),
    Machine(r"^A100", "dgx-a100-80g", "a100-sxm4-80gb"),
    Machine(r"^H100.*(95|96)", "dgx-h100", "h100-sxm-96gb-hbm2e"),
    Machine(r"^H100.*64", "dgx-h100", "h100-sxm-64gb-hbm2e", 4, link="nvlink4-gh200"),
    Machine(r"^H100.*PCIe", "dgx-h100", "h100-pcie-80gb", link="pcie5-through-host"),
    Machine(r"^H100.*NVL", "dgx-h100", "h100-nvl-94gb", link="pcie5-through-host"),
    Machine(r"^H100", "dgx-h100", "h100-sxm-80gb"),
    Machine(r"^H200", "hgx-h200", "h200-sxm"),
    Machine(r"^H20\b", "hgx-h200", "h20"),
    Machine(r"^GB200", "hgx-b200", "gb200", 64, network=PORT_EACH),
    Machine(r"^GB300", "hgx-b200", "gb300", 64, network=PORT_EACH),
    Machine(r"^B200", "hgx-b200", "b200"),
    Machine(r"^B300", "hgx-b200", "b300"),
    Machine(r"^V100.*SXM3", "dgx2-v100", "v100-sxm3-32gb", 16),
    Machine(r"^V100.*16", "v100-4x", "v100-sxm2-16gb", 4),
    Machine(r"^V100", "v100-4x", "v100-sxm2-32gb", 4),
    Machine(r"^(RTX.?)?4090", "rtx-4090-workstation", "rtx-4090"),
    Machine(r"^(RTX.?)?4080\b(?!.?S)", "rtx-4090-workstation", "rtx-4080"),
    Machine(r"^(RTX.?)?5080\b", "rtx-5090-workstation", "rtx-5080"),
    Machine(r"^(RTX.?)?3090.?Ti", "rtx-3090x4-workstation", "rtx-3090-ti", 4),
    Machine(r"^(RTX.?)?3090\b", "rtx-3090x4-workstation", "rtx-3090", 4),
    Machine(r"^(RTX.?)?3080\b(?!.?(Ti|12))", "rtx-3090x4-workstation", "rtx-3080", 4),
    Machine(r"^(RTX.?)?2080.?Ti", "rtx-3090x4-workstation", "rtx-2080-ti", 4),
    Machine(r"^(RTX.?)?A5000", "rtx-3090x4-workstation", "rtx-a5000", 4),
    Machine(r"^(RTX.?)?A?6000.*Ada", "rtx-4090x2-workstation", "rtx-6000-ada", 2),
    Machine(r"^MI300X", "mi300x-8x", "mi300x"),
    Machine(r"^MI325X", "mi300x-8x", "mi325x"),
    Machine(r"^MI350X", "mi300x-8x", "mi350x", link="infinity-fabric-4-8x"),
    Machine(r"^MI355X", "mi300x-8x", "mi355x", link="infinity-fabric-4-8x"),
    Machine(r"^A10G", "a10g-cloud", "a10g"),
    Machine(r"^A10\b", "a10g-cloud", "a10"),
    Machine(r"^L4\b", "l4-cloud", "l4"),
    Machine(r"^T4\b", "t4-cloud", "t4"),
)


class UnknownMachineError(Exception):
    """No shipped description of the row's GPU."""


def machine_of(row: PublishedRow) -> NodeGroup:
    """Nodes for all of the row's GPUs. Raises UnknownMachineError."""
    model = f"{row.gpu} SXM3" if row.gpu.startswith("V100") and row.gpus_per_node == 16 else row.gpu
    found = next((m for m in MACHINES if re.search(m.pattern, model, re.IGNORECASE)), None)
    if found is None:
        raise UnknownMachineError(
            f"no description of a {row.gpu} is shipped; docs/extending.md says how to add one"
        )
    assert row.n_gpus
    cluster = DESKTOP if HALF_LANES in row.notes else found.cluster
    group, gpu = find_cluster(cluster).group, find_gpu(found.gpu)
    if (TF32.search(row.notes) or row.precision == "tf32") and "tf32" in gpu.peak_flops:
        peaks = gpu.peak_flops | {"fp32": gpu.peak_flops["tf32"]}
        shares = (gpu.gemm_efficiencies or {}) | {"fp32": gpu.gemm_share("tf32")}
        gpu = gpu.model_copy(update={"peak_flops": peaks, "gemm_efficiencies": shares})
    if own := OWN_PRODUCTS.search(row.notes):
        reached = (float(own[1]) + float(own[2])) / 2
        gpu = gpu.model_copy(update={"gemm_efficiency": reached, "gemm_power_limit": None})
    per_node = min(row.gpus_per_node or found.gpus_per_node, row.n_gpus)
    inter = group.inter_node or find_network("infiniband-hdr-8x200")
    link = find_link(found.link) if found.link else group.intra_node
    return group.model_copy(
        update={
            "gpu": gpu,
            "gpus_per_node": per_node,
            "nodes": -(-row.n_gpus // per_node),
            "intra_node": _intra(link, row),
            "inter_node": _inter(inter, row.inter_node or found.network, per_node),
        }
    )


def _intra(link: GpuLink, row: PublishedRow) -> GpuLink:
    """The node's link, or what the row states: 4 NVLink links, a bridge, or an old desktop."""
    if OLD_BOARD in row.notes:
        return find_link("pcie3-x8-through-host")
    stated = row.intra_node or ""
    if "NVLink bridge" in stated:
        return find_link("nvlink3-bridge")
    return find_link("nvlink3-4-links") if "4 links" in stated else link


FABRICS = re.compile(r"\bIB\b|InfiniBand|[EHN]DR|Slingshot|RoCE|RDMA", re.IGNORECASE)
NOMINAL_NETWORK = 200e9  # bytes/s per node of infiniband-hdr-8x200; its file has what is reached


def _inter(network: Network, text: str, per_node: int) -> Network:
    """The network, at the rate the row states: Gb/s or GB/s, per node, per GPU or times links.

    The rate of a network in FABRICS is that of a port, and every GPU has one. The rate of another
    network is that of a node. Links that are counted are network cards.
    """
    if "OmniPath" in text:
        return find_network("omni-path-4x100")
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+)\s*(Gb/s|Gbps|GB/s)", text)
    if found is None:
        return network
    of_a_port = FABRICS.search(text) and not (found[1] or "node" in text)
    times = int(found[1] or 1) * (per_node if of_a_port or "per GPU" in text else 1)
    rate = times * int(found[2]) * (1e9 if found[3] == "GB/s" else 1e9 / 8)
    if rate == 0:
        return network
    usual = find_network("infiniband-hdr-8x200")
    reached = rate * usual.bandwidth / NOMINAL_NETWORK
    nics = int(found[1]) if found[1] else None
    return usual.model_copy(update={"name": text, "bandwidth": reached, "nics": nics})
