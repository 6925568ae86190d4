"""What ranks of any split hold, write and read: together one process's, each element once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

pytest.importorskip("torch")

from bigplan.plan import Plan
from bigplan.runtime.checkpoint import latest, restore
from bigplan.runtime.first_values import first_values
from bigplan.runtime.homes import fill_first
from tests.examples import examples
from tests.runtime.harness import same
from tests.runtime.reference import State
from tests.runtime.split_ranks import alone, every_rank, split_pairs, state_of_all, write

KINDS = 3  # of stored values: two moments, and weights or their master copies


def _begun(plan: Plan, folder: Path | None = None) -> State:
    """The first state of all ranks as one, and a checkpoint of it, each element written once."""
    with every_rank(plan) as ranks:
        for context in ranks:
            fill_first(context, first_values(plan.model, plan.training))
        if folder is not None:
            files = write(ranks, plan, folder).files
            stored = sum(tensor.rectangle.elements for file in files for tensor in file.tensors)
            assert stored == KINDS * plan.model.parameter_count
        return state_of_all(ranks)


@settings(max_examples=examples(20), phases=[Phase.generate])  # to shrink one takes minutes
@given(split_pairs())
def test_any_split_begins_as_one_process_and_reads_what_any_other_wrote(
    plans: tuple[Plan, Plan],
) -> None:
    one, two = plans
    with tempfile.TemporaryDirectory() as folder:
        begun = _begun(one, Path(folder))
        same("first state", _begun(alone(one)), begun)
        with every_rank(two) as ranks:
            for context in ranks:
                restore(context, latest(Path(folder)))
            same("state", begun, state_of_all(ranks))
