"""YAML nodes, which know their lines, put together anew: what data built from parts came from."""

from __future__ import annotations

import yaml

from bigplan.spec.problems import KeyPath


def node_at(root: yaml.Node | None, path: KeyPath) -> yaml.Node | None:
    """The node of the value at `path`; None where there is none."""
    node = root
    for part in path:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        else:
            return None
    return node


def grafted(root: yaml.Node | None, path: KeyPath, value: yaml.Node | None) -> yaml.Node | None:
    """The tree with `value` at `path`, where problems are then told with the value's line."""
    if not path or root is None or value is None:
        return value
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    inner = next((node for key, node in pairs if key.value == path[0]), None)
    if inner is None:
        inner = yaml.MappingNode("tag:yaml.org,2002:map", [], value.start_mark, value.end_mark)
    key = yaml.ScalarNode("tag:yaml.org,2002:str", str(path[0]), value.start_mark, value.end_mark)
    others = [pair for pair in pairs if pair[0].value != path[0]]
    pair = (key, grafted(inner, path[1:], value))
    return yaml.MappingNode(root.tag, [*others, pair], root.start_mark, root.end_mark)
