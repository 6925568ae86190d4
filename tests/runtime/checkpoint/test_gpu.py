"""Checkpoints of state in GPU memory: what is read back is what was there, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from bigplan.placement import Tier
from bigplan.plan import Plan
from tests.runtime.checkpoints import away, on_device, passing, resident, running
from tests.runtime.harness import same, state_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "plan", [resident(), away(), away(Tier.NVME, chunk=5_000), passing(chunk=5_000)]
)
@pytest.mark.parametrize("other", [resident(), away(Tier.NVME), passing()])
def test_state_comes_back(tmp_path: Path, plan: Plan, other: Plan) -> None:
    """Kernels need not repeat their sums, so states are compared and not losses."""
    with running(on_device(plan, "cuda")) as (worker, _):
        worker.step()
        worker.step(tmp_path)
        first = state_of(worker)  # of step 1: the second step's updates wait
        worker.save(tmp_path)
        second = state_of(worker)
    for step, state in (1, first), (2, second):
        path = tmp_path / f"step-00000{step}"
        with running(on_device(other, "cuda"), path) as (worker, done):
            assert done == step
            same(path.name, state, state_of(worker))
            worker.step()
            worker.finish()
