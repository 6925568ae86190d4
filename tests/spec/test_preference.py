"""What is learned from pairs, as the user writes it."""

from __future__ import annotations

import pytest

from bigplan.errors import InputError
from bigplan.spec.catalog import find_model
from bigplan.spec.files.document import validate
from bigplan.spec.preference import Preference
from bigplan.spec.training import TrainingRequest, resolve

LLAMA = find_model("tiny-llama-test")


def _resolved(**preference: object) -> Preference:
    request = validate({"preference": preference}, TrainingRequest, "training")
    found = resolve(request, LLAMA).preference
    assert found is not None
    return found


def test_each_method_has_its_papers_numbers() -> None:
    assert [_resolved(method=name).beta for name in ("dpo", "orpo", "simpo")] == [0.1, 0.1, 2.0]
    assert _resolved(method="simpo").gamma == 1.0
    assert _resolved(method="simpo", gamma=0.0).gamma == 0.0
    assert _resolved(method="dpo").refers
    assert not _resolved(method="orpo").refers


def test_dpo_is_written_as_before() -> None:
    dumped = _resolved(method="dpo", beta=0.2).model_dump()
    assert dumped == {"method": "dpo", "beta": 0.2, "label_smoothing": 0.0}


def test_simpo_alone_has_a_gamma() -> None:
    with pytest.raises(InputError, match=r"gamma is 0.5 and the method orpo; simpo alone"):
        _resolved(method="orpo", gamma=0.5)
