"""Network cards of a node, as Linux lists them."""

from pathlib import Path

import pytest

from bigplan.launcher.survey import _with_cards
from bigplan.profile.cards import Cards, cards
from bigplan.spec.link import find_network


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)


def port(root: Path, device: str, state: str, rate: str) -> None:
    folder = root / "infiniband" / device / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "rate").write_text(f"{rate}\n")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Two fast cards, one that is down, and a slower one for storage."""
    for number in range(2):
        port(tmp_path, f"mlx5_{number}", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_2", "1: DOWN", "400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_3", "4: ACTIVE", "100 Gb/sec (4X EDR)")
    (tmp_path / "net" / "eth0" / "device").mkdir(parents=True)
    (tmp_path / "net" / "lo").mkdir()
    (tmp_path / "net" / "bond0" / "bonding").mkdir(parents=True)
    (tmp_path / "net" / "bond0" / "bonding" / "slaves").write_text("eth1 eth2\n")
    return tmp_path


def test_nccl_takes_the_fastest_that_are_active(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cards("eth0", cuda=True, root=node) == Cards(
        2, "/sys/class/infiniband, active ones of 400 Gb/s"
    )
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert cards("eth0", cuda=True, root=node) == Cards(1, "sockets on eth0")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    assert cards("eth0", cuda=True, root=node) is None


@pytest.mark.parametrize(("interface", "number"), [("eth0", 1), ("bond0", 2), ("lo", None)])
def test_sockets_take_the_interface_that_is_named(
    node: Path, interface: str, number: int | None
) -> None:
    found = cards(interface, cuda=False, root=node)
    assert (found and found.number) == number


def test_a_network_has_the_fewest_cards_of_its_nodes() -> None:
    network = find_network("ethernet-10g")
    found = _with_cards(network, [Cards(8, "eight"), Cards(4, "four")])
    assert (found.nics, found.sources["nics"].endswith("four")) == (4, True)
    assert _with_cards(network, [Cards(8, "eight"), None]) == network
