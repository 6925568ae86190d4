"""The loss layer's chunk: bounded from below by what the search prices, then the most that fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bigplan.cost import price
from bigplan.errors import InputError
from bigplan.graph.build import build_graph, loss_chunks
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower, lower_buffers
from bigplan.placement import Placement, Tier
from bigplan.plan import Plan, graph_of
from bigplan.planner import Request, make_plan, programs_of
from bigplan.solve.alike import ROOMY
from bigplan.solve.candidate import Candidate, Pricing, Workload, try_out
from bigplan.solve.loss import LossLayer
from bigplan.solve.pins import Pin, parse_pins
from bigplan.solve.resolve import resolve
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from bigplan.verify import rank_bytes, verify

# No test asks how good the plans are.
pytestmark = pytest.mark.usefixtures("first_plans")

MIB = 2**20
MODEL = find_model("llama-3-8b").model_copy(update={"layers": 4})
TRAINING = Training(sequence_length=8192, global_batch=8)
NODES = find_cluster("h200-1x").group
WORKLOAD = Workload(MODEL, TRAINING, NODES)


@cache
def _plan(gpu: int, **settings: int) -> Plan:
    cluster = find_cluster("h200-1x").with_caps(gpu=gpu * MIB)
    return make_plan(Request(MODEL, TRAINING, cluster, {"micro_batch": 1, **settings}))


def test_chunks_double_up_to_the_micro_batch() -> None:
    assert loss_chunks(MODEL, TRAINING, Strategy(dp=1)) == (1024, 2048, 4096, 8192)
    odd = TRAINING.model_copy(update={"sequence_length": 1500})
    assert loss_chunks(MODEL, odd, Strategy(dp=1, micro_batch=2)) == (1024, 2048, 3000)
    short = TRAINING.model_copy(update={"sequence_length": 100})
    assert loss_chunks(MODEL, short, Strategy(dp=1, micro_batch=2)) == (200,)
    # 128,256 words: 16,384 tokens are 2.1 billion logits, just below what 32 bits count
    assert loss_chunks(MODEL, TRAINING, Strategy(dp=1, micro_batch=4))[-1] == 16384
    assert loss_chunks(MODEL, TRAINING, Strategy(dp=1, tp=2, micro_batch=4))[-1] == 32768


def test_capacity_is_the_strategys_own_whichever_was_priced_first() -> None:
    """Stages in the middle have communicators both ways; a pipeline of two has none there.

    With virtual stages every stage has them, and messages go around from the last to the first.
    """
    nodes = find_cluster("dgx-h100").with_nodes(3).group
    pricing = Pricing(Workload(MODEL, TRAINING, nodes))
    for strategy in (Strategy(dp=4, pp=2), Strategy(dp=4, pp=2, vpp=2), Strategy(dp=2, pp=4)):
        candidate = pricing.candidate(strategy)
        assert candidate.loss is not None
        for chunk in candidate.loss.chunks:
            graph, costs = candidate.loss.settled(candidate.graph, candidate.costs, chunk)
            exact = price(graph, TRAINING, nodes)
            assert costs.capacity == exact.capacity
            assert costs.reserve == exact.reserve


@pytest.mark.parametrize("strategy", [Strategy(dp=1), Strategy(tp=2, dp=4), Strategy(pp=2, dp=4)])
def test_what_the_search_prices_is_below_every_chunk(strategy: Strategy) -> None:
    nodes = find_cluster("dgx-h100").group
    loss = LossLayer.of(MODEL, TRAINING, nodes, strategy)
    graph = loss.relaxed_graph()
    costs = price(graph, TRAINING, nodes)
    name, before = graph.layers[-1], 0.0
    for chunk in reversed(loss.chunks):
        exact, settled = loss.settled(graph, costs, chunk)
        assert exact == build_graph(MODEL, TRAINING, strategy, chunk, fused=True)
        assert settled == price(exact, TRAINING, nodes)
        assert graph.kinds[name].backward_workspace <= exact.kinds[name].backward_workspace
        assert costs.kinds[name].backward <= settled.kinds[name].backward
        assert before <= settled.kinds[name].backward  # larger chunks are faster
        before = settled.kinds[name].backward


def test_memory_decides() -> None:
    roomy, tight = _plan(141_000), _plan(15_000)
    assert roomy.placement.loss_chunk == 8192
    assert tight.placement.loss_chunk < 8192
    for plan in (roomy, tight):
        candidate, programs = programs_of(plan)
        assert candidate.graph == graph_of(plan)
        costs = candidate.costs
        verify(programs, candidate.graph, costs.capacity, costs.sharing)
        assert plan.predicted.lower_bound_seconds <= plan.predicted.step_seconds


def test_the_largest_chunk_that_fits_is_taken() -> None:
    """A few bytes less, and it is the next one."""
    candidate = Candidate.of(WORKLOAD, Strategy(dp=1))
    assert candidate.loss is not None
    placement = _plan(141_000).placement
    needed = {}
    for chunk in candidate.loss.chunks:
        chosen = placement.model_copy(update={"loss_chunk": chunk})
        settled = candidate.settled(chosen)
        needed[chunk] = rank_bytes(lower(settled.graph, chosen), Tier.GPU)
    assert needed[8192] > needed[4096] > needed[2048] >= needed[1024]
    for size in needed.values():
        for capacity in (size, size - 1):
            expected = max((c for c, need in needed.items() if need <= capacity), default=None)
            assert _chunk(candidate, placement, capacity, candidate.costs.reserve) == expected
    for chunk in candidate.loss.chunks[1:]:
        # Where nothing is reserved for logits, as much as they are is kept free.
        capacity = needed[chunk] + candidate.loss.kind(chunk).largest
        assert _chunk(candidate, placement, capacity, 0) == chunk
        assert _chunk(candidate, placement, capacity - 1, 0) == chunk // 2


def _chunk(candidate: Candidate, placement: Placement, capacity: int, reserve: int) -> int | None:
    """The chunk that a placement has on GPUs of so many bytes beside a reserve; None: none fits."""
    tiers = {**candidate.costs.capacity, Tier.GPU: capacity}
    costs = replace(candidate.costs, capacity=tiers, reserve=reserve, page_tables=0.0)
    trial = try_out(replace(candidate, costs=costs), placement)
    return None if trial is None else trial.placement.loss_chunk


def test_logits_above_the_reserve_are_kept_free_on_all_stages() -> None:
    nodes = find_cluster("dgx-h100").group
    candidate = Candidate.of(Workload(MODEL, TRAINING, nodes), Strategy(pp=2, dp=4))
    found = resolve(candidate, ROOMY, ())
    assert candidate.loss is not None
    assert found is not None
    programs = lower_buffers(candidate.graph, found.placement)
    first, last = (rank_bytes([program], Tier.GPU) for program in programs)
    kind = candidate.loss.kind(candidate.loss.chunks[-1])
    more = kind.backward_workspace - programs[-1].buffers["workspace"].nbytes
    assert first - last > more > 0  # so the last stage has room for it
    for free, whole in ((kind.largest, True), (kind.largest - 1, False)):
        chunk = candidate.loss.fitting(programs, first + free, 0)
        assert (chunk == candidate.loss.chunks[-1]) == whole


def test_a_chunk_can_be_set() -> None:
    free, fixed = _plan(141_000), _plan(141_000, loss_chunk=2048)
    assert fixed.placement.loss_chunk == 2048
    assert fixed.predicted.step_seconds > free.predicted.step_seconds
    again = _plan(141_000, loss_chunk=free.placement.loss_chunk)
    assert again.placement == free.placement
    assert _plan(141_000, loss_chunk=10**6).placement.loss_chunk == 8192
    assert parse_pins({"loss_chunk": 2048})[1] == (Pin(None, "loss_chunk", "", 2048.0),)
    with pytest.raises(InputError, match="--set loss_chunk=0: write a whole number of at least 1"):
        parse_pins({"loss_chunk": 0})
