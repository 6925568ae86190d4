"""What a rank's process shows to CUDA."""

from __future__ import annotations

import os

import pytest

from bigplan.launcher import actor


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ("2", "2,0,1,3"),
        ("0", "0,1,2,3"),
        ("", ""),  # Ray shows none
        ("1,2", "1,2"),
        ("GPU-5a3b", "GPU-5a3b"),  # a name, of which the numbers are not known
    ],
)
def test_the_others_come_behind_the_own_gpu(
    own: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "gpus_here", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    actor.see_peers()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
