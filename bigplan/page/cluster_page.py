"""A cluster as a page: what it has, how fast its parts are, and the source of every number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from bigplan.page.charts.compared import rates_chart
from bigplan.page.charts.roofline import roofline_chart
from bigplan.page.parts import Chart, Grid, Page, PageSection
from bigplan.page.picture import above
from bigplan.report.text import bytes_text
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.files.dump import numbers
from bigplan.spec.part import MachinePart
from bigplan.units import counted

PARTS = ("gpu", "host", "pcie", "nvme", "intra_node", "inter_node", "running")


def cluster_page(cluster: Cluster) -> Page:
    """The page of all groups of nodes, one after the other."""
    sections = [part for group in cluster.node_groups for part in _sections(cluster, group)]
    charts = [chart.spec for section in sections for chart in section.charts]
    return Page(
        title=cluster.name,
        headline=_headline(cluster),
        sections=tuple(sections),
        picture=lambda: above(*charts),
    )


def _headline(cluster: Cluster) -> str:
    groups = "; ".join(
        f"{counted(group.nodes, 'node')} of {group.gpus_per_node} x {group.gpu.name} "
        f"({bytes_text(group.gpu.memory)} each), {bytes_text(group.host.memory)} of host memory"
        + (f" and {bytes_text(group.nvme.node_capacity)} on drives" if group.nvme else "")
        for group in cluster.node_groups
    )
    said = f" {cluster.description.rstrip('.')}." if cluster.description else ""
    return f"{groups}.{said}"


def _sections(cluster: Cluster, group: NodeGroup) -> Iterator[PageSection]:
    of = f" of {group.name}" if len(cluster.node_groups) > 1 else ""
    number = cluster.node_groups.index(group)
    gpu = group.gpu
    roofs = {str(name): rate for name, rate in gpu.peak_flops.items()}
    yield PageSection(
        f"How fast its parts are{of}",
        charts=(
            Chart(
                f"rates-{number}",
                "Bytes a second, per GPU",
                "Nominal for the GPU's memory, reached by large transfers elsewhere; what GPUs of "
                "a node share is divided by them. One division of the axis is a factor.",
                rates_chart(_rates(group)),
            ),
            Chart(
                f"roofs-{number}",
                f"Roofs of {gpu.name}",
                "The most FLOP/s of each precision by how often a byte of memory is used.",
                roofline_chart((), roofs, gpu.memory_bandwidth),
            ),
        ),
    )
    yield PageSection(f"Where every number is from{of}", grids=tuple(_sources(group)))


def _rates(group: NodeGroup) -> dict[str, float]:
    """Bytes/s by what carries them, fastest first."""
    pcie, part = group.pcie, group.shared_by(group.gpus).rate_of_rank
    rates = {
        "GPU memory": group.gpu.memory_bandwidth,
        "host memory": part(group.host.memory_bandwidth),
        "to the GPU": min(pcie.host_to_device, part(pcie.node_host_to_device)),
        "from the GPU": min(pcie.device_to_host, part(pcie.node_device_to_host)),
    }
    if group.gpus_per_node > 1:
        rates[f"between GPUs ({group.intra_node.name})"] = group.intra_node.bandwidth
    if group.inter_node is not None:
        rates[f"between nodes ({group.inter_node.name})"] = part(group.inter_node.bandwidth)
    if group.nvme is not None:
        rates["drives, reading"] = part(group.nvme.node_read)
        rates["drives, writing"] = part(group.nvme.node_write)
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def _sources(group: NodeGroup) -> Iterator[Grid]:
    """The numbers of every part; those of one key have one source."""
    for name in PARTS:
        block = getattr(group, name)
        if not isinstance(block, MachinePart):
            continue
        values: dict[str, list[str]] = defaultdict(list)
        for key, (_, text) in numbers(block).items():
            first, _, rest = key.partition(".")
            values[first].append(f"{rest} {text}".strip())
        rows = tuple(
            (key, ", ".join(texts), block.sources.get(key, "default"))
            for key, texts in values.items()
        )
        yield Grid(name, ("key", "value", "source"), rows)
