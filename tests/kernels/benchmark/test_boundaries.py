"""Choices to fuse or not: each can be either way, and the cover has what is predicted faster."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from bigplan.kernels.benchmark.boundaries import Choices
from bigplan.kernels.fusion.families import block_graph
from bigplan.kernels.fusion.keep import best_plan
from bigplan.kernels.here import pricer_for
from bigplan.spec.catalog import find_model


@pytest.fixture(scope="module")
def search() -> Choices:
    pricer = pricer_for("h100-sxm-80gb")
    block = block_graph(find_model("qwen3-0.6b"), 8, 2048, "bf16")
    return Choices(best_plan(block, pricer).graph, pricer)


def test_a_choice_is_inside_one_kernel_of_the_cover_or_between_two(search: Choices) -> None:
    found = list(search.all())
    groups = set(search.owner.values())
    assert len(found) > 20
    for choice in found:
        assert not choice.first & choice.second
        whole = choice.first | choice.second
        assert choice.fused == (whole in groups)
        assert choice.fused or {choice.first, choice.second} <= groups


def test_groups_that_stay_apart_are_predicted_faster_so(search: Choices) -> None:
    for group in set(search.owner.values()):
        for other in search.neighbours(group):
            assert (
                search.gain(group, other) <= 0
                or search.ordered([*(set(search.owner.values()) - {group, other}), group | other])
                is None
            )
