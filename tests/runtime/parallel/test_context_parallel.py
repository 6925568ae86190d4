"""Ranks that split sequences compute what a plain loop does, and meet in the planned exchanges."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bigplan.graph.build import build_graph
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.operators import Collective
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from bigplan.runtime.layers.carried import Carried, Turn
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.kinds import Block
from bigplan.runtime.mixers import positions
from bigplan.runtime.parallel.context_parallel import WHOLE, ContextParallel
from bigplan.runtime.parallel.group import RankGroup
from bigplan.runtime.parallel.tensor_parallel import ONE
from bigplan.spec.carried import KEYS, OWN_INPUT, VALUES
from bigplan.spec.model import ModelSpec
from tests.examples import examples
from tests.runtime.harness import check, execute, together
from tests.runtime.neighbours import Called, side_by_side
from tests.runtime.parallel.context_ranks import plans
from tests.runtime.parallel.sharded_ranks import (
    MASKED,
    Ran,
    all_resident,
    check_same_model,
    check_validation,
    executed,
    results,
    run_rank,
    write_plans,
)
from tests.runtime.plans import carrying, models, plan_of, tiny_model, tiny_training
from tests.runtime.rounding import BF16_LOSS, check_in_16_bits

BATCH, LENGTH = 4, 256  # so that a part's statistics are no longer too small to count
# Sums of up to 256 terms in another order, through a block forward and backward: 1e-5 is 170 unit
# roundoffs of fp32.
APART = 1e-5


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed: each set of processes starts once."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"context-{ranks}")
    return executed(folder, ranks, partial(plans, ranks))


def test_they_train_as_a_plain_loop_does(ran: Ran, subtests: pytest.Subtests) -> None:
    """And end with one model on all ranks; some have one rank's loss of a validation, too."""
    ranks, folder, found = ran
    for name, plan in found.items():
        with subtests.test(name):
            runs = results(folder, name, ranks)
            check_same_model(runs)
            if name.startswith(MASKED):
                check_validation(plan, runs)
            if plan.training.precision == "fp32":
                check(plan, together(runs))
            else:
                check_in_16_bits(plan, together(runs))


class _Layer:
    """One block, its input and the gradient by its output."""

    def __init__(self, model: ModelSpec, size: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(1)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.model, self.size = model.seen_by("block"), size
        self.parameters = {p.name: 0.1 * make(*p.shape) for p in model.kinds()["block"]}
        self.flat = torch.cat([value.flatten() for value in self.parameters.values()])
        self.x, self.gradient = make(*size, model.hidden), make(*size, model.hidden)
        heads = (*size, model.kv_heads, model.head_dim)
        self.keys_values = (make(*heads), make(*heads)) if model.keys_given else ()
        own = model.block_inputs
        self.own = None if own is None else make(*size, own.width)

    def turn(self, group: RankGroup) -> Turn:
        """What the block finds beside the residual stream, of a rank's tokens."""
        own = None if self.own is None else self.part(self.own, group)[None]
        carried = Carried(torch.empty(0), own)
        reads = () if own is None else (OWN_INPUT,)
        if self.keys_values:
            keys, values = (self.part(one, group) for one in self.keys_values)
            carried.kept[False], reads = (keys, values), (*reads, KEYS, VALUES)
        return Turn(carried=carried, reads=reads)

    def part(self, values: Tensor, group: RankGroup) -> Tensor:
        return values.chunk(group.size, 1)[group.place].contiguous()

    def run(self, recompute: Recompute, context: ContextParallel = WHOLE) -> tuple[Tensor, ...]:
        """Output, gradient by the input, bytes kept, and gradients by parameters, of its tokens."""
        tables = positions.position_tables(
            self.model, self.size[1], "cpu", torch.float32, positions.Sharing(ONE, context)
        )
        block = Block(self.model, tables, ONE, context, in_product=False)
        sizes = [value.numel() for value in self.parameters.values()]
        views = {
            name: part.view(value.shape)
            for (name, value), part in zip(
                self.parameters.items(), torch.split(self.flat, sizes), strict=True
            )
        }
        kept = KeptActivations(weights=self.flat.view(torch.uint8))
        turn = self.turn(context.group)
        output = block.record(views, self.part(self.x, context.group), kept, recompute, turn)
        nbytes = torch.tensor(kept.nbytes)
        by_input, gradients = kept.gradients(self.part(self.gradient, context.group))
        found = [by for name, by in gradients.items() if name not in turn.reads]
        return output, by_input, nbytes, *(one.flatten() for one in found)


def _exchanged(kind: LayerKind, recompute: Recompute) -> Counter[Called]:
    """What the planner counts: what a full recomputation runs again is here the forward."""
    found = Counter[Called]()
    rerun = kind.reruns.get(recompute)
    first = kind.forward if recompute is not Recompute.FULL else ()
    for one in (*first, *(rerun.operators if rerun else ()), *kind.backward):
        if isinstance(one, Collective):
            found[one.pattern, one.nbytes] += one.count
    return found


def _block(model: ModelSpec, cp: int) -> LayerKind:
    training = tiny_training(BATCH, sequence_length=LENGTH)
    strategy = Strategy(dp=1, cp=cp, micro_batch=BATCH)
    return build_graph(model, training, strategy, fused=True).kinds["block"]


@given(
    models(kv_heads=(1, 2, 4))
    | carrying().flatmap(lambda one: st.sampled_from(one.block_kinds).map(one.seen_by)),
    st.sampled_from((2, 4)),
    st.sampled_from(tuple(Recompute)),
)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_a_block_of_ranks_computes_exchanges_and_keeps_what_it_should(
    model: ModelSpec, cp: int, recompute: Recompute
) -> None:
    _check_block(model, cp, recompute)


# On four ranks: each has three value heads, and two have the same key head.
FEW_KEYS = {"key_heads": 2, "value_heads": 12, "key_dim": 4, "value_dim": 6, "taps": 3}
SPACES = {"heads": 8, "head_dim": 6, "state": 10}


@pytest.mark.parametrize(
    "parts",
    [
        {"delta_rule": FEW_KEYS},
        {"delta_rule": FEW_KEYS | {"key_heads": 4}},
        *({"state_space": SPACES | {"groups": groups}} for groups in (1, 2, 8)),
    ],
    ids=["shared-keys", "own-keys", "one-group", "shared-groups", "own-groups"],
)
def test_heads_that_serve_several_are_exchanged_once_for_each_rank(
    parts: dict[str, object],
) -> None:
    _check_block(tiny_model(**parts), 4, Recompute.NONE)


def _check_block(model: ModelSpec, cp: int, recompute: Recompute) -> None:
    layer = _Layer(model, (BATCH, LENGTH))
    whole = layer.run(recompute)
    found, called = side_by_side(cp, lambda group: layer.run(recompute, ContextParallel(group)))
    # A full recomputation does not compute the output, which nothing in the backward reads.
    for number, plain in list(enumerate(whole[:2]))[recompute is Recompute.FULL :]:
        ours = torch.cat([one[number] for one in found], 1)
        assert float((ours - plain).norm() / plain.norm()) < APART
    plain = torch.cat(whole[3:])
    summed = sum(torch.cat(one[3:]) for one in found)
    assert float((summed - plain).norm() / plain.norm()) < APART
    kind = _block(model, cp)
    assert Counter(called) == _exchanged(kind, recompute)
    if recompute is not Recompute.FULL:  # whose input the caller keeps
        assert {int(one[2]) for one in found} == {kind.kept(recompute)}


@pytest.mark.gpu
def test_kernels_have_whole_sequences_of_a_ranks_heads(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Of one key head, or one group, that both ranks have: on a GPU each, or together on one."""
    rule = {"key_heads": 1, "value_heads": 4, "key_dim": 64, "value_dim": 64}
    space = {"heads": 4, "head_dim": 64, "state": 64}
    found = dict[str, tuple[Plan, ...]]()
    training = tiny_training(2, sequence_length=256, precision="bf16")
    for name, parts in (("delta_rule", rule), ("state_space", space)):
        model = tiny_model(max_sequence_length=256, **{name: parts})
        for layout in (Strategy(dp=1, cp=2), Strategy(dp=1)):
            where = all_resident(build_graph(model, training, layout))
            plan = plan_of(model, training, layout, where, "cuda")
            found[name] = (*found.get(name, ()), plan)
    write_plans(tmp_path, {name: split for name, (split, _) in found.items()})
    own_gpu = torch.cuda.device_count() > 1  # NCCL takes no two ranks of one
    given = str(tmp_path), None if own_gpu else "gloo", own_gpu
    spawn(run_rank, given, nprocs=2)  # type: ignore[no-untyped-call]
    for name, (_, whole) in found.items():
        with subtests.test(name):
            expected = pytest.approx(execute(whole).losses, rel=BF16_LOSS)
            for run in results(tmp_path, name, 2):
                assert run.losses == expected
