"""What a rank tells of gathers that copy engines were to do."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from bigplan.graph.strategy import Strategy
from bigplan.runtime import notes
from bigplan.runtime.parallel.group import ALONE, RankGroup
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import NodeGroup

CUDA = torch.device("cuda", 0)
DGX = find_cluster("dgx-h100").group
TWO = DGX.model_copy(update={"nodes": 2})
WITH_ENGINES: Any = SimpleNamespace()


@pytest.mark.parametrize(
    ("strategy", "nodes", "group", "told"),
    [
        (Strategy(dp=8, zero=3), DGX, RankGroup(8), "took multiprocessors.*: the reason"),
        (Strategy(dp=8, zero=3), DGX, RankGroup(8, copy_engines=WITH_ENGINES), ""),
        (Strategy(dp=8), DGX, RankGroup(8), ""),  # nothing is gathered
        (Strategy(dp=16, zero=3), TWO, RankGroup(16), ""),  # kernels, as planned
        (Strategy(dp=1), DGX, ALONE, ""),
    ],
)
def test_kernels_that_gather_in_place_of_engines_are_told(
    strategy: Strategy,
    nodes: NodeGroup,
    group: RankGroup,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "why_no_copy_engines", lambda device: "the reason")
    monkeypatch.setattr(notes, "sized_as", lambda training, device: "")
    context: Any = SimpleNamespace(
        groups=SimpleNamespace(shard=group),
        memory=SimpleNamespace(device=CUDA),
        graph=SimpleNamespace(strategy=strategy),
        training=None,
    )
    found = " ".join(notes.notes_of(CUDA, context, nodes))
    assert re.fullmatch(f".*{told}" if told else "", found)
