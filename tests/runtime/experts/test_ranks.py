"""Processes that share out experts train as one with all of them does, and go on from any other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bigplan.graph.build import build_graph
from bigplan.plan import Plan
from bigplan.spec.model import ModelSpec
from tests.runtime.checkpoints import Course, course
from tests.runtime.experts.courses import (
    ALONE,
    KINDS,
    STEPS,
    names,
    plan_for,
    plans,
    played,
    run_rank,
)
from tests.runtime.experts.ranks import expert_cases
from tests.runtime.harness import execute, joined, same
from tests.runtime.masked import masked_data, prepare_masked
from tests.runtime.parallel.sharded_ranks import (
    MASKED,
    all_resident,
    check_same_model,
    check_validation,
    results,
    run_rank_unseen,
    write_plans,
)
from tests.runtime.plans import plan_of
from tests.runtime.processes import start

# Of a loss after as many steps, relative: sums have another order, and AdamW divides by what may
# be little.
APART = 1e-5
Ran = tuple[int, Path]


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"experts-{ranks}")
    write_plans(folder, plans(ranks))
    start(run_rank, folder, ranks)
    return ranks, folder


@pytest.fixture(scope="module")
def alone() -> dict[str, Course]:
    """All steps by one process with all experts."""
    torch.set_num_threads(1)
    most = {kind: max(len(names(ranks, kind)) for ranks in (2, 4)) for kind in KINDS}
    return {kind: course(plan_for(kind), STEPS + most[kind]) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_they_train_as_one_does(
    ran: Ran, alone: dict[str, Course], kind: str, subtests: pytest.Subtests
) -> None:
    ranks, folder = ran
    for number, name in enumerate(names(ranks, kind)):
        with subtests.test(name):
            courses = [played(folder, f"{kind}-{name}", rank) for rank in range(ranks)]
            assert {one.first for one in courses} == {number}
            wanted = alone[kind].losses[number:][:STEPS]
            for one in courses:
                assert one.losses == courses[0].losses
                assert one.losses == pytest.approx(wanted, rel=APART)


@pytest.mark.parametrize("kind", KINDS)
def test_they_go_on_where_others_stopped(ran: Ran, kind: str, subtests: pytest.Subtests) -> None:
    """With the same bits, whoever had which experts."""
    ranks, folder = ran
    for before, name in pairwise(names(ranks, kind)):
        with subtests.test(f"{before} then {name}"):
            old, new = (
                [played(folder, f"{kind}-{one}", rank) for rank in range(ranks)]
                for one in (before, name)
            )
            written = tuple(joined(one) for one in zip(*(c.written for c in old), strict=True))
            begun = tuple(joined(one) for one in zip(*(c.begun for c in new), strict=True))
            same("first state", written, begun)
            assert len({one.digest for one in new}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_goes_on_where_they_stopped(ran: Ran, kind: str) -> None:
    ranks, folder = ran
    name = names(ranks, kind)[0]
    written = [played(folder, f"{kind}-{name}", rank).written for rank in range(ranks)]
    after = course(plan_for(kind), 0, folder / f"{kind}-{name}.saved")
    assert after.first == STEPS - 1
    same("state", tuple(joined(one) for one in zip(*written, strict=True)), after.begun)


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_and_what_is_kept_may_be_on_any_tier(
    ranks: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """With every stage of ZeRO, clipping, accumulation and targets that count nothing."""
    prepare_masked(str(tmp_path))
    plans = expert_cases(ranks, str(masked_data(str(tmp_path))))
    write_plans(tmp_path, plans)
    start(run_rank_unseen, tmp_path, ranks)
    # One training of each model and batch.
    alone = {_work(plan): _by_one(plan) for plan in plans.values()}
    found = {work: execute(plan, looks=False) for work, plan in alone.items()}
    for name, plan in plans.items():
        with subtests.test(name):
            runs = results(tmp_path, name, ranks)
            steps = runs[0].results
            wanted = found[_work(plan)].results[: len(steps)]
            check_same_model(runs)
            if name.startswith(MASKED):
                check_validation(alone[_work(plan)], runs)
            for ours, alike in zip(steps, wanted, strict=True):
                assert ours.loss == pytest.approx(alike.loss, rel=APART)
                assert ours.gradient_norm == pytest.approx(alike.gradient_norm, rel=APART)


def _work(plan: Plan) -> tuple[ModelSpec, int]:
    return plan.model, plan.training.global_batch


def _by_one(plan: Plan) -> Plan:
    """The same training by one process, which keeps everything on its device."""
    strategy = ALONE.model_copy(update={"micro_batch": plan.strategy.micro_batch})
    placement = all_resident(build_graph(plan.model, plan.training, strategy))
    return plan_of(plan.model, plan.training, strategy, placement)
