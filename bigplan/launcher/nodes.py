"""The nodes of a Ray cluster: which are there, which answer, and which could take ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import ip_address

# Ray notices a killed node after about 15 s, and a machine that went away even later: it asks a
# node every 3 s whether the node is well, and five questions must fail. A port answers at once.
ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class Node:
    """A node that Ray has, or had."""

    key: str  # Ray's name of it, new whenever it is started
    name: str  # as it was started with (--node-name), else its address
    address: str
    port: int  # of Ray's process there
    resources: Mapping[str, float] = field(compare=False)

    @property
    def there(self) -> str:
        """The node's name, and its address if that differs."""
        return self.name if self.name == self.address else f"{self.name} ({self.address})"

    @property
    def only_loopback(self) -> bool:
        """Whether no other machine can reach it."""
        return ip_address(self.address).is_loopback

    def fits(self, bundle: Mapping[str, float]) -> bool:
        """Whether it has so much, busy or not."""
        return all(self.resources.get(name, 0.0) >= amount for name, amount in bundle.items())

    def answers(self) -> bool:
        """Whether Ray's process there takes connections."""
        try:
            socket.create_connection((self.address, self.port), ANSWER_SECONDS).close()
        except OSError:
            return False
        return True


def known() -> tuple[Node, ...]:
    """The nodes that Ray takes for alive, by name."""
    import ray

    found = (
        Node(
            node["NodeID"],
            node["NodeName"] or node["NodeManagerAddress"],
            node["NodeManagerAddress"],
            node["NodeManagerPort"],
            node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    )
    return tuple(sorted(found, key=lambda node: (node.name, node.key)))


def answering(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes that answer; all are asked at the same time."""
    asked = tuple(nodes)
    with ThreadPoolExecutor(max(1, min(64, len(asked)))) as pool:
        there = list(pool.map(Node.answers, asked))
    return tuple(node for node, answers in zip(asked, there, strict=True) if answers)


def keys(nodes: Iterable[Node]) -> dict[str, str]:
    """Ray's keys of the nodes that answer, by name.

    For some seconds Ray takes a lost node for alive, beside the one of its name that has come back.
    """
    return {node.name: node.key for node in answering(nodes)}


def fitting(bundle: Mapping[str, float]) -> tuple[Node, ...]:
    """The nodes that answer and have so much each, busy or not."""
    return answering(node for node in known() if node.fits(bundle))


def gone(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes among these that were lost."""
    asked = tuple(nodes)
    alive = {node.key for node in known()}
    there = {node.key for node in answering(node for node in asked if node.key in alive)}
    return tuple(node for node in asked if node.key not in there)
