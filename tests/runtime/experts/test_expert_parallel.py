"""Ranks that have some experts each compute together what one rank with all of them does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Recompute
from bigplan.graph.operators import Collective
from bigplan.graph.strategy import Strategy
from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.expert_parallel import ALL_HERE, ExpertParallel
from bigplan.runtime.experts.mixture import DOWN, GATE, ROUTER, UP
from bigplan.runtime.layers.kept import SMALL, KeptActivations
from bigplan.runtime.layers.kinds import Block
from bigplan.runtime.layers.visit import Visit
from bigplan.runtime.mixers import positions
from bigplan.runtime.parallel.group import RankGroup
from bigplan.runtime.parallel.groups import store_of
from bigplan.runtime.parallel.tensor_parallel import ONE
from bigplan.spec.model import ModelSpec
from tests.examples import examples
from tests.runtime.neighbours import Turn, side_by_side
from tests.runtime.plans import tiny_model, tiny_training
from tests.runtime.processes import start

LENGTH = 8  # tokens of a sequence
MATRICES = (GATE, UP, DOWN)  # of experts, whose biases all ranks have
# Sums of some hundred terms in fp32 in another order: 1e-5 is 170 unit roundoffs.
APART = 1e-5
# Which experts tokens like: all alike, those of the first rank alone, or one alone.
LIKED = ("any", "first rank", "one")
SHARED = {"shared_ffn": 16}
BIASED = {"mlp": "clamped_swiglu", "mlp_bias": True, "routing": {"score_bias": True}}
OF_GEMMA = SHARED | {
    "mlp": "geglu",
    "norms": "around",
    "expert_norms": "each",
    "routing": {"score_scale": 0.3, "expert_scales": True},
}
SIGMOIDS = {"routing": {"scores": "sigmoid", "bias": True, "scale": 2.5}}

recomputes = st.sampled_from(tuple(Recompute))
sizes = st.sampled_from(((2, 4, 2), (4, 4, 3), (4, 8, 1), (2, 6, 3)))  # ranks, experts, of a token
parts = st.sampled_from(({}, SHARED, SIGMOIDS, BIASED, OF_GEMMA, {"router_normalised": True}))


@pytest.fixture(autouse=True, scope="module")
def _as_in_a_plain_loop() -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


@dataclass
class _Layer:
    """A block with experts, sequences for it, and the gradient by what it makes of them."""

    model: ModelSpec
    x: Tensor
    gradient: Tensor
    values: dict[str, Tensor]

    @classmethod
    def of(cls, model: ModelSpec, sequences: int, liked: str = "any", size: int = 1) -> _Layer:
        made = torch.Generator().manual_seed(sequences)
        shape = (sequences, LENGTH, model.hidden)
        x, gradient = (torch.randn(*shape, generator=made) for _ in range(2))
        values = {
            p.name: 0.1 * torch.randn(*p.shape, generator=made) for p in model.kinds()["block"]
        }
        if liked != "any":
            # Tokens have this direction in common, which only those experts read.
            values["post_norm.weight"] = torch.ones(model.hidden)
            x[..., 0] = 30.0
            few = max(model.experts_per_token, model.experts // size if liked != "one" else 1)
            values[ROUTER][:, 0] = 0.0
            values[ROUTER][:few, 0] = 5.0
        return cls(model, x, gradient, values)

    def own(self, group: RankGroup) -> _Layer:
        """Sequences and experts of a rank."""
        values = {n: _experts(n, v, self.model, group).clone() for n, v in self.values.items()}
        x, gradient = (group.own(one).clone() for one in (self.x, self.gradient))
        return _Layer(self.model, x, gradient, values)


def _experts(name: str, values: Tensor, model: ModelSpec, group: RankGroup) -> Tensor:
    """Those of a rank, of a parameter that experts may have: rows of all take turns."""
    if name not in MATRICES:
        return values
    each = values.view(model.ffn, model.experts, -1)
    return each.tensor_split(group.size, dim=1)[group.place].flatten(0, 1)


@dataclass
class _Result:
    output: Tensor
    by_input: Tensor
    gradients: dict[str, Tensor]
    kept: int  # bytes


def _flat(values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    flat = torch.cat([value.flatten() for value in values.values()])
    pieces = torch.split(flat, [value.numel() for value in values.values()])
    return flat, {n: p.view(v.shape) for (n, v), p in zip(values.items(), pieces, strict=True)}


def _run(
    layer: _Layer,
    recompute: Recompute,
    spread: ExpertParallel = ALL_HERE,
    *,
    in_product: bool = True,
    balance: Callable[[], float] | None = None,
    evaluates: bool = True,
    between: Callable[[KeptActivations], None] = lambda kept: None,
) -> _Result:
    """A forward and a backward; `between` them something may become of what is kept."""
    model, (flat, tensors) = layer.model, _flat(layer.values)
    rope = positions.position_tables(
        model, layer.x.shape[1], layer.x.device, torch.float32, positions.Sharing(ONE)
    )
    block = Block(model, rope, in_product=in_product)
    block.spread, block.balance = spread, balance
    totals = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    turn = cast(
        Visit, Turn(flat, tensors, layer.x.clone(), layer.gradient.clone(), recompute, totals)
    )
    evaluated = block.evaluate(turn) if evaluates else None
    kept = KeptActivations(weights=flat.view(torch.uint8))
    output = block.forward(turn, kept)
    assert evaluated is None or torch.equal(output, evaluated)
    nbytes = kept.nbytes
    between(kept)
    return _Result(output, block.backward(turn, kept), totals, nbytes)


def _ranks(
    layer: _Layer, size: int, recompute: Recompute, **how: object
) -> tuple[_Result, list[tuple[str, int]]]:
    """The same by so many ranks, put together; and the collectives that they met in."""

    def run(group: RankGroup) -> _Result:
        return _run(layer.own(group), recompute, ExpertParallel(group), **how)  # type: ignore[arg-type]

    found, called = side_by_side(size, run)
    gradients = {name: torch.zeros_like(value) for name, value in layer.values.items()}
    for place, one in enumerate(found):
        for name, mine in one.gradients.items():
            whole = _experts(name, gradients[name], layer.model, RankGroup(size, place))
            if name in MATRICES:
                into = gradients[name].view(layer.model.ffn, layer.model.experts, -1)
                into.tensor_split(size, dim=1)[place].copy_(
                    mine.view(layer.model.ffn, -1, layer.model.hidden)
                )
            else:
                whole += mine
    output, by_input = (
        torch.cat([getattr(one, n) for one in found]) for n in ("output", "by_input")
    )
    return _Result(output, by_input, gradients, found[0].kept), called


def _check(ours: _Result, alone: _Result) -> None:
    for mine, wanted in ((ours.output, alone.output), (ours.by_input, alone.by_input)):
        assert float((mine - wanted).norm() / wanted.norm()) < APART
    usual = _rms(torch.cat([one.flatten() for one in alone.gradients.values()]))
    for name, wanted in alone.gradients.items():
        # One that cancels to zero is as exact as the others.
        assert _rms(ours.gradients[name] - wanted) < APART * max(_rms(wanted), usual), name


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _model(experts: int, each: int, **changes: object) -> ModelSpec:
    few = {"hidden": 32, "ffn": 24, "layers": 1, "heads": 4}
    return tiny_model(experts=experts, experts_per_token=each, **few | changes)


@given(sizes, recomputes, parts, st.sampled_from(LIKED), st.booleans())
@settings(max_examples=examples(60), derandomize=True, deadline=None)
def test_ranks_compute_what_one_does(
    sizes: tuple[int, int, int],
    recompute: Recompute,
    changes: dict[str, object],
    liked: str,
    in_product: bool,
) -> None:
    """With every recomputation, and where ranks or experts get no row."""
    size, count, each = sizes
    layer = _Layer.of(_model(count, each, **changes), 4, liked, size)
    alone = _run(layer, recompute, in_product=in_product)
    found, _ = _ranks(layer, size, recompute, in_product=in_product)
    _check(found, alone)


@pytest.mark.parametrize("liked", LIKED)
def test_tokens_like_the_experts_that_these_tests_want(liked: str) -> None:
    """So that ranks and experts without a row are tested."""
    layer, busy = _Layer.of(_model(8, 1), 4, liked, 4), list[list[int]]()

    def note(kept: KeptActivations) -> None:
        chosen = next(t for t in kept.saved if isinstance(t, Tensor) and t.dtype is torch.int32)
        busy.append(torch.bincount(chosen.flatten(), minlength=8).tolist())

    _run(layer, Recompute.NONE, between=note)
    rows = [sum(busy[0][2 * rank : 2 * rank + 2]) for rank in range(4)]
    wanted = {"any": 4, "first rank": 1, "one": 1}[liked]
    assert sum(number > 0 for number in rows) == wanted
    if liked == "one":
        assert busy[0] == [4 * LENGTH] + [0] * 7


@pytest.mark.parametrize("recompute", [Recompute.MLP, Recompute.FULL])
def test_what_is_recomputed_keeps_as_many_bytes_wherever_rows_go(recompute: Recompute) -> None:
    """So it has fixed places in host memory, where it may go and come back."""
    found = []
    for liked in LIKED:
        layer = _Layer.of(_model(4, 2), 4, liked, 4)

        def away(kept: KeptActivations) -> None:
            host = torch.empty(kept.nbytes, dtype=torch.uint8)
            storages = kept.move_out(host)
            kept.fetch(host, storages, torch.device("cpu"))

        ours, _ = _ranks(layer, 4, recompute, between=away)
        _check(ours, _run(layer, recompute))
        found.append(ours.kept)
    assert len(set(found)) == 1


def test_rows_that_came_are_kept_where_the_mlp_is_not_recomputed() -> None:
    """The first rank has all of them: what else it keeps is as much as without any.

    Rows, gate and up; their weights are too small to be counted.
    """
    busy, idle = (
        [one.kept for one in _of_each(_Layer.of(_model(4, 1), 4, "one", 4), Recompute.SELECTIVE)][n]
        for n in (0, 3)
    )
    rows, widths = 4 * LENGTH, 32 + 2 * 24
    assert 4 * rows < SMALL
    assert busy - idle == 4 * rows * widths


def _of_each(layer: _Layer, recompute: Recompute) -> list[_Result]:
    found, _ = side_by_side(
        4, lambda group: _run(layer.own(group), recompute, ExpertParallel(group))
    )
    return found


@pytest.mark.parametrize("recompute", list(Recompute))
def test_ranks_meet_in_these_exchanges(recompute: Recompute) -> None:
    """Tokens go out and back, forward and backward, and once more where they are recomputed.

    With them their weights go out, and these weights' gradients back; choices go out once, after
    their numbers.
    """
    _, called = _ranks(_Layer.of(_model(4, 2), 4), 4, recompute)
    rows, counts = (sum(one == name for one, _ in called) for name in ("rows", "all_to_all"))
    forward, backward, again = 2 + 1 + 1, 2 + 1, 1 + 1
    recomputed = recompute in (Recompute.MLP, Recompute.FULL)
    full = recompute is Recompute.FULL
    assert rows == 2 * forward + backward + again * recomputed + full  # `_run` evaluates first
    assert counts == 2 + full


@pytest.mark.parametrize("recompute", list(Recompute))
def test_balance_is_that_of_a_rank_s_tokens(recompute: Recompute) -> None:
    """As of data-parallel ranks that have all experts."""
    layer = _Layer.of(_model(4, 2), 4)
    ours, _ = _ranks(layer, 4, recompute, balance=lambda: 3.0)
    plain = [
        _run(_Layer(layer.model, x[None], g[None], layer.values), recompute, balance=lambda: 3.0)
        for x, g in zip(layer.x, layer.gradient, strict=True)
    ]
    gradients = {n: sum(one.gradients[n] for one in plain) for n in layer.values}
    output, by_input = (
        torch.cat([getattr(one, n) for one in plain]) for n in ("output", "by_input")
    )
    _check(ours, _Result(output, by_input, cast(dict[str, Tensor], gradients), 0))


@given(st.sampled_from(((2, 4), (4, 4), (3, 9))), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=examples(60), derandomize=True, deadline=None)
def test_a_token_comes_once_to_a_rank(several: tuple[int, int], each: int, seed: int) -> None:
    """There it has a row for each of its experts that are there; back comes a sum for each rank."""
    ranks, count = several
    made = torch.Generator().manual_seed(seed)
    scores = torch.randn(ranks, 5, count, generator=made)
    own = count // ranks

    def run(group: RankGroup) -> tuple[list[float], list[list[float]], Tensor, Tensor]:
        by, place = experts.RowOperators(), group.place
        weights, places = experts.route(scores[place], each, normalised=False)
        dispatch = ExpertParallel(group).dispatch(places, count)
        x = torch.arange(5.0)[:, None] + 10.0 * place
        tokens = dispatch.came(by, x)()
        here, ends = dispatch.here(places), [0, *dispatch.ends(places).tolist()]
        rows = by.sent(tokens, here)
        mine = [rows[a:b].flatten().tolist() for a, b in pairwise(ends)]
        there = dispatch.weights(weights, places)
        assert len(there) == len(rows) == ends[-1]
        back = dispatch.combined(by, torch.ones_like(rows), places)()
        assert back.flatten().tolist() == [each] * 5
        assert torch.equal(dispatch.returned(there, places), weights)
        return tokens.flatten().tolist(), mine, there, scores[place]

    found, _ = side_by_side(ranks, run)
    chosen = scores.topk(each).indices
    for rank, (tokens, mine, weights, _) in enumerate(found):
        mask = (chosen[..., None] == torch.arange(own) + own * rank).any(2)  # [ranks, 5, own]
        numbers = torch.arange(5.0) + 10.0 * torch.arange(ranks)[:, None]
        assert tokens == numbers[mask.any(-1)].tolist()
        assert mine == [numbers[mask[..., e]].tolist() for e in range(own)]
        shares = scores.softmax(-1)[..., own * rank : own * (rank + 1)]
        wanted = torch.cat([shares[..., e][mask[..., e]] for e in range(own)])
        torch.testing.assert_close(weights, wanted)


def _exchange(rank: int, folder: str) -> None:
    """Rows from everybody to everybody, as many as both ranks' numbers say; back they come."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = store_of(Path(folder) / "meeting", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    group = RankGroup(4, rank, dist.group.WORLD)
    for dtype in (torch.float32, torch.bfloat16):
        out = [rank * other % 3 for other in range(4)]
        rows = [[10.0 * rank + other, n] for other in range(4) for n in range(out[other])]
        sent = torch.tensor(rows, dtype=dtype).view(-1, 2)
        found = group.exchanged_rows(sent, out, out)()
        wanted = [[10.0 * other + rank, n] for other in range(4) for n in range(out[other])]
        assert torch.equal(found, torch.tensor(wanted, dtype=dtype).view(-1, 2))
        assert torch.equal(group.exchanged_rows(found, out, out)(), sent)
    dist.destroy_process_group()


def test_processes_exchange_uneven_rows(tmp_path: Path) -> None:
    start(_exchange, tmp_path, 4)


PAIRS = list(combinations(range(8), 2))
LONG = 20 * len(PAIRS)  # tokens of a rank, so that no statistic is too small to be counted


def _equal(model: ModelSpec, ranks: int) -> _Layer:
    """Tokens that choose each pair of eight experts equally often, on every rank."""
    made = torch.Generator().manual_seed(0)
    x, gradient = (0.01 * torch.randn(ranks, LONG, model.hidden, generator=made) for _ in range(2))
    tokens = torch.arange(LONG)
    for chosen in zip(*PAIRS, strict=True):
        x[:, tokens, torch.tensor(chosen).repeat(LONG // len(PAIRS))] = 30.0
    values = {p.name: 0.01 * torch.randn(*p.shape, generator=made) for p in model.kinds()["block"]}
    values["post_norm.weight"] = torch.ones(model.hidden)
    values[ROUTER] = torch.eye(model.experts, model.hidden)
    return _Layer(model, x, gradient, values)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("changes", [{}, SHARED])
def test_ranks_keep_and_exchange_what_the_planner_counted(
    changes: dict[str, object], recompute: Recompute
) -> None:
    """Where experts are equally busy; where rows lie is kept beside what is saved."""
    model = _model(8, 2, max_sequence_length=LONG, **changes)
    training = tiny_training(4, sequence_length=LONG)
    kind = build_graph(model, training, Strategy(dp=4, ep=4), fused=True).kinds["block"]

    def run(group: RankGroup) -> _Result:
        layer, spread = _equal(model, 4).own(group), ExpertParallel(group)
        return _run(layer, recompute, spread, evaluates=False)

    found, called = side_by_side(4, run)
    came = LONG * 13 // 7  # of 28 pairs, 4 are on one rank
    places = 4 * (2 * came + came + 2 * LONG + 2 * LONG) * (recompute is not Recompute.FULL)
    for one in found:  # parts of bytes are cut off
        assert one.kept + places == pytest.approx(kind.kept(recompute), abs=16)
    rerun = kind.reruns.get(recompute)
    operators = (*kind.forward, *(rerun.operators if rerun else ()), *kind.backward)
    wanted = [one for one in operators if isinstance(one, Collective)]
    counted = sorted(n for one in wanted for n in [one.nbytes] * one.count)
    assert {one.pattern for one in wanted} == {"all_to_all"}
    assert sorted(nbytes for _, nbytes in called) == pytest.approx(counted, abs=16)
