"""Zero groups, each with a copy of what ZeRO shards, train as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")


from bigplan.graph.build import build_graph
from bigplan.graph.strategy import WIDEST_CUT, Strategy
from bigplan.plan import Plan
from bigplan.runtime.checkpoint import Manifest, Saver
from bigplan.runtime.context import Context
from bigplan.runtime.parallel.apart import Apart
from tests.runtime.experts.ranks import WITH_EXPERTS
from tests.runtime.harness import check, execute, joined, together
from tests.runtime.parallel.sharded_ranks import (
    MASKED,
    Ran,
    all_resident,
    check_same_model,
    check_validation,
    executed,
    results,
)
from tests.runtime.parallel.split_ranks import every_rank
from tests.runtime.parallel.zero_group_ranks import zero_group_cases
from tests.runtime.plans import plan_of, tiny_model, tiny_training
from tests.runtime.rounding import check_in_16_bits

APART = 1e-5  # of a loss after as many steps, relative: sums have another order


@pytest.fixture(scope="module", params=[4, 8])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"zero-groups-{ranks}")
    return executed(folder, ranks, partial(zero_group_cases, ranks))


def test_every_step_is_that_of_a_plain_loop(ran: Ran, subtests: pytest.Subtests) -> None:
    """Losses, norms, skipped steps, and the state that all ranks have together after each step."""
    ranks, folder, plans = ran
    for name, plan in plans.items():
        with subtests.test(name):
            run = together(results(folder, name, ranks))
            if plan.strategy.tp > 1 and plan.training.precision != "fp32":
                check_in_16_bits(plan, run)
            else:
                check(plan, run)


def test_replicas_have_the_same_bits_and_groups_share_them_out(
    ran: Ran, subtests: pytest.Subtests
) -> None:
    """Each group of neighbours has the whole state, and its ranks a part each."""
    ranks, folder, plans = ran
    for name, plan in plans.items():
        with subtests.test(name):
            runs = results(folder, name, ranks)
            check_same_model(runs)
            strategy = plan.strategy
            if strategy.pp * strategy.tp > 1:
                continue
            for first in range(0, ranks, strategy.zero_group):
                group = [run.states[-1] for run in runs[first : first + strategy.zero_group]]
                for layer in zip(*group, strict=True):
                    whole = joined(layer).moments[0]
                    assert not whole.isnan().any()
                    own = [len(whole) - int(one.moments[0].isnan().sum()) for one in layer]
                    assert sum(own) == len(whole)
                    assert max(own) < len(whole) or len(whole) <= WIDEST_CUT


def test_losses_are_those_of_one_process(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, plans = ran
    alone: dict[str, list[float]] = {}
    for name, plan in plans.items():
        if plan.training.precision != "fp32" or plan.model.router_loss:
            continue
        with subtests.test(name):
            one = _by_one(plan)
            work = f"{one.training} {one.model}"
            if work not in alone:
                alone[work] = execute(one).losses
            losses = results(folder, name, ranks)[0].losses
            assert losses == pytest.approx(alone[work], rel=APART)


def test_they_validate_as_one_does(ran: Ran) -> None:
    ranks, folder, plans = ran
    name = next(name for name in plans if name.startswith(MASKED))
    check_validation(_without_groups(plans[name]), results(folder, name, ranks))


def _written(contexts: Sequence[Context], folder: Path, each: int) -> list[set[str]]:
    """The files of a checkpoint that every rank writes, where so many ranks see one folder."""
    found = []
    for rank, context in enumerate(contexts):
        first = rank - rank % each
        place = Apart(f"place-{first}", tuple(range(first, first + each)), lambda *_: None)
        apart = None if each == len(contexts) else place
        at_place = replace(context, groups=replace(context.groups, apart=apart))
        manifest = Manifest(
            step=1, model=context.model, training=context.training, plan="", state={}, files=()
        )
        saver = Saver(at_place, folder, manifest)
        found.append({file.name for file in saver._files.values()})
        saver.close()
    return found


@pytest.mark.parametrize("ep", [1, 2])
def test_replicas_share_the_writing_and_each_place_keeps_what_its_ranks_hold(
    ep: int, tmp_path: Path
) -> None:
    strategy = Strategy(dp=4, ep=ep, zero=3, zero_group=2)
    model, training = tiny_model(layers=3, **WITH_EXPERTS), tiny_training(4)
    placement = all_resident(build_graph(model, training, strategy))
    with every_rank(plan_of(model, training, strategy, placement)) as contexts:
        together, apart, alone = (_written(contexts, tmp_path, each) for each in (4, 2, 1))
    every = set.union(*together)
    assert sum(map(len, together)) == len(every)  # no file is written twice
    assert all(together)
    assert [a | b for a, b in (apart[:2], apart[2:])] == [every, every]
    assert alone[:2] == alone[2:] == apart[:2]


def _without_groups(plan: Plan) -> Plan:
    strategy = plan.strategy.model_copy(update={"zero_group": 0})
    return plan.model_copy(update={"strategy": strategy})


def _by_one(plan: Plan) -> Plan:
    """The same training by one process, which keeps everything on its device."""
    strategy = Strategy(dp=1, micro_batch=2)
    placement = all_resident(build_graph(plan.model, plan.training, strategy))
    return plan_of(plan.model, plan.training, strategy, placement)
