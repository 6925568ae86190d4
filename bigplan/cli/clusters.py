"""`bigplan clusters`: the shipped clusters, or one cluster in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.completion import known_clusters

if TYPE_CHECKING:
    from bigplan.spec.cluster import Cluster, NodeGroup, Nvme
    from bigplan.spec.part import MachinePart

    Finder = Callable[[str], MachinePart]


def clusters(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one: shipped name or cluster YAML.", autocompletion=known_clusters
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped clusters, or show one as YAML with the source of every number."""
    from bigplan.spec.catalog import find_cluster, list_clusters

    if name is not None:
        _show(find_cluster(name), as_json)
        return
    found = [find_cluster(known) for known in list_clusters()]
    if as_json:
        print_json({"clusters": [row for cluster in found for row in _rows(cluster)]})
    else:
        _print_table(found)


def _show(cluster: Cluster, as_json: bool) -> None:
    """Shipped GPU types and links are written out: the document stands alone."""
    if as_json:
        print_json({"cluster": cluster.model_dump()})
    else:
        print("\n".join(_commented(cluster)))


def _commented(cluster: Cluster) -> Iterator[str]:
    """The lines of its YAML; a comment says where a shipped name may stand for a whole section."""
    from bigplan.spec.files.dump import to_yaml

    groups = iter(cluster.node_groups)
    names: dict[str, str] = {}
    for line in to_yaml(cluster).splitlines():
        if line.startswith("- "):
            names = dict(_shipped_parts(next(groups)))
        key = line.strip().removesuffix(":")
        if line == f"  {key}:" and key in names:
            told = f"`{key}: NAME` in place of this section takes another"
            yield f"{line} # {names[key]}, as shipped; {told}"
        else:
            yield line


def _shipped_parts(group: NodeGroup) -> Iterator[tuple[str, str]]:
    """The keys of its parts that ship, with their names."""
    from bigplan.spec.gpu import find_gpu, list_gpus
    from bigplan.spec.link import find_link, find_network, list_links, list_networks

    shipped: tuple[tuple[str, MachinePart | None, Finder, tuple[str, ...]], ...] = (
        ("gpu", group.gpu, find_gpu, list_gpus()),
        ("intra_node", group.intra_node, find_link, list_links()),
        ("inter_node", group.inter_node, find_network, list_networks()),
    )
    for key, part, find, names in shipped:
        name = next((name for name in names if find(name) == part), None)
        if name is not None:
            yield key, name


def _rows(cluster: Cluster) -> list[dict[str, Any]]:
    """The sizes of every node group; bytes, and bytes/s of the network per node."""
    return [
        {
            "name": cluster.name,
            "description": cluster.description,
            "nodes": group.nodes,
            "gpus_per_node": group.gpus_per_node,
            "gpu": group.gpu.name,
            "gpu_memory": group.gpu.memory,
            "host_memory": group.host.memory,
            "nvme": group.nvme.node_capacity if group.nvme else 0,
            "network": group.inter_node.bandwidth if group.inter_node else None,
        }
        for group in cluster.node_groups
    ]


def _print_table(found: list[Cluster]) -> None:
    from rich.console import Console

    from bigplan.report.text import table

    numbers = ("GPU memory", "host")
    columns = ("name", "GPUs a node", *numbers, "NVMe", "network")
    title = "Shipped clusters (one node; --nodes N takes more)"
    shown = table(title, *columns, right=numbers, whole=columns[:1])
    for cluster in found:
        for group in cluster.node_groups:
            shown.add_row(cluster.name, *_cells(group))
    Console().print(shown)


def _cells(group: NodeGroup) -> tuple[str, ...]:
    from bigplan.report.text import bytes_text

    network = group.inter_node
    return (
        f"{group.gpus_per_node} x {group.gpu.name}",
        bytes_text(group.gpu.memory),
        bytes_text(group.host.memory),
        _drives(group.nvme),
        network.name if network else "one node only",
    )


def _drives(nvme: Nvme | None) -> str:
    from bigplan.report.text import bytes_text

    return f"{nvme.drives} x {bytes_text(nvme.capacity)}" if nvme else "none"
