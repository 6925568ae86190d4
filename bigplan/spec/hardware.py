"""A cluster as it would be with other parts: more drives, another GPU, a faster link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.files.document import validate
from bigplan.spec.files.problems import models_in
from bigplan.spec.files.words import did_you_mean
from bigplan.spec.part import MachinePart

NewValue = str | int | float

# These have keys of their own in an experiment.
_ELSEWHERE = {"nodes": "nodes"}


def refuse_unknown(changes: Mapping[str, NewValue]) -> None:
    """Raise InputError for a dotted key that a node group lacks."""
    for key in changes:
        first = key.partition(".")[0]
        if first in _ELSEWHERE:
            raise InputError(f"{key}: write `{_ELSEWHERE[first]}` beside `hardware`")
        known = changeable()
        if key not in known:
            raise InputError(
                f"{quoted(key)} is no key of a node{did_you_mean(key, known)} (such are gpu, "
                "gpus_per_node, nvme.drives and host.memory)"
            )


def changeable() -> list[str]:
    """The dotted keys of a node group that `hardware` may have."""
    return [
        key for key in dict.fromkeys(_keys(NodeGroup)) if key.partition(".")[0] not in _ELSEWHERE
    ]


def _keys(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Dotted keys of a description and of the parts in it, without sources and names."""
    for name, field in model.model_fields.items():
        if entries := _entries(field.annotation):
            yield from (f"{before}{name}.{entry}" for entry in entries)
        elif name not in ("sources", "name"):
            yield before + name
            for part in models_in(field.annotation):
                yield from _keys(part, f"{before}{name}.")


def _entries(annotation: Any) -> tuple[str, ...]:
    """The keys of a figure that has several, such as one for each precision."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict and get_origin(arguments[0]) is Literal:
        return get_args(arguments[0])
    return next(filter(None, map(_entries, arguments)), ())


def with_hardware(cluster: Cluster, changes: Mapping[str, NewValue]) -> Cluster:
    """This cluster with figures or whole parts of every node replaced.

    `changes` has dotted keys of a node group: {"nvme.drives": 4, "gpu": "h200-sxm"}. Parts come
    first, so that "gpu.memory" is the new GPU's in whatever order they are. The source of a changed
    figure says so. Raises InputError, RefusedError.
    """
    parts = {key: value for key, value in changes.items() if "." not in key}
    figures = {key: value for key, value in changes.items() if "." in key}
    for some in (parts, figures):
        if some:
            cluster = _changed(cluster, some)
    return cluster


def _changed(cluster: Cluster, changes: Mapping[str, NewValue]) -> Cluster:
    data = cluster.model_dump(mode="json", exclude_none=True)
    for group, raw in zip(cluster.node_groups, data["node_groups"], strict=True):
        figures: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in changes.items():
            part, dot, name = key.partition(".")
            whole, several, entry = name.partition(".")
            if several:
                figures[part].setdefault(whole, raw[part].get(whole, {}) | {})[entry] = value
            elif dot:
                figures[part][name] = value
            else:
                raw[part] = value
        raw |= {part: _part(group, part).changed(given) for part, given in figures.items()}
    return validate(data, Cluster, "hardware")


def _part(group: NodeGroup, part: str) -> MachinePart:
    block = getattr(group, part)
    if isinstance(block, MachinePart):
        return block
    raise RefusedError(
        f"hardware.{part}: {group.name} has none whose figures could change; describe it in a "
        "cluster file"
    )
