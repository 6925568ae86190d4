"""The simulator against hand-computed schedules and against a plain player of the same rules."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.content import Content, Holds
from bigplan.cost import Costs, KindCost, Rates
from bigplan.cost.costs import Slowed
from bigplan.cost.host import UpdateLaunch
from bigplan.errors import VerificationError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.order import order_of
from bigplan.placement import Placement, Share, StagePlacement, Tier
from bigplan.program import LINKS, Action, Lane, Op, Program, Ref, expand
from bigplan.simulate import action_seconds, simulate, step_seconds, total_seconds
from bigplan.simulate.rank import Message
from bigplan.spec.sharing import NodeSharing
from bigplan.units import PerRank
from tests.examples import examples
from tests.toys import COSTS, Case, cases, kind_placement, placed, toy_graph

FAST = Rates(*[PerRank(1e15)] * 10)  # moves and updates that take no time
BLOCK = KindCost(1, 2, reruns={Recompute.FULL: 0.75})
PASSES = {"embedding": KindCost(0, 0), "block": BLOCK, "head": KindCost(0, 0)}
IDEAL = Costs(PASSES, FAST, 0.0, COSTS.capacity, NodeSharing(1))
TINY = 1e-6  # what is left of moves at 1e15 bytes/s


def _ref(kind: Holds) -> Ref:
    return Ref("somewhere", Content(kind, 0))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("units", [1, 3, 4, 9])
@pytest.mark.parametrize("group", [1, 2])
def test_one_forward_one_backward_takes_units_plus_stages(
    stages: int, units: int, group: int
) -> None:
    graph = toy_graph(Strategy(dp=1, pp=stages, accumulation_group=group), blocks=4, units=units)
    seconds = simulate(lower(graph, placed(graph)), graph, IDEAL).seconds
    # A stage's blocks take 3 seconds each for forward and backward of a micro-batch. A unit's
    # first micro-batch goes on at once, so filling and draining costs one micro-batch a stage.
    each = 3 * (4 // stages)
    if group == 1 or stages == 1:
        assert seconds == pytest.approx((units * group + stages - 1) * each, abs=TINY)
    else:
        assert seconds >= (units * group + stages - 1) * each - TINY


@pytest.mark.parametrize(
    ("rate", "slots", "seconds"),
    [
        # Blocks of 72 bytes; forward 1 s, backward 2 s each.
        # 1 s to load one, three slots: only the first load is waited for.
        (72.0, 3, 1 + 4 * 1 + 4 * 2),
        # 2 s each: the forward runs at the link's pace, 8 s + 1; backward finds blocks 2, 3 and 4
        # in the slots (6 s), meanwhile block 1 comes back.
        (36.0, 3, 8 + 1 + 6 + 2),
        # One slot: load and compute alternate, except that block 4 is still there.
        (36.0, 1, 4 * (2 + 1) + 2 + 3 * (2 + 2)),
    ],
)
def test_prefetch_into_slots(rate: float, slots: int, seconds: float) -> None:
    graph = toy_graph(blocks=4, units=1, deferred=False)
    streamed = kind_placement(4, Tier.HOST, optimizer=Tier.HOST)
    costs = replace(IDEAL, rates=replace(FAST, h2d=PerRank(rate)))
    programs = lower(graph, placed(graph, slots=slots, block=streamed))
    assert simulate(programs, graph, costs).seconds == pytest.approx(seconds, abs=TINY)


def test_recomputation_runs_most_of_the_forward_twice() -> None:
    graph = toy_graph(blocks=4, units=2)
    again = kind_placement(4, activations=(Recompute.FULL, Tier.GPU))
    seconds = simulate(lower(graph, placed(graph, block=again)), graph, IDEAL).seconds
    assert seconds == pytest.approx(2 * 4 * (1 + 0.75 + 2), abs=TINY)


def test_a_clipped_update_hides_behind_the_first_forward_alone() -> None:
    # 36 elements a block at 9 elements/s: 4 s each on the CPU, one block after the other, and
    # block 1's forward waits for its update: 4 x 4 s, then the last block's forward, then 4 x 2.
    costs = replace(IDEAL, rates=replace(FAST, cpu_update=PerRank(9.0)))
    graph = toy_graph(blocks=4, units=1)
    on_host = kind_placement(4, optimizer=Tier.HOST)
    seconds = simulate(lower(graph, placed(graph, block=on_host)), graph, costs).seconds
    assert seconds == pytest.approx(16 + 1 + 8, abs=TINY)
    # Without clipping each update follows its backward: the last one starts when the others have.
    graph = replace(graph, deferred=False)
    seconds = simulate(lower(graph, placed(graph, block=on_host)), graph, costs).seconds
    assert seconds == pytest.approx(4 + 2 + 16, abs=TINY)


def test_activations_leave_slower_beside_the_update() -> None:
    rates = replace(FAST, d2h=PerRank(8.0), state_out=PerRank(4.0), latency=0.5)
    costs, graph = replace(IDEAL, rates=rates), toy_graph()
    save = Action(Op.SAVE, Lane.D2H, 1, amount=16)
    beside = save._replace(beside_update=True)
    assert action_seconds(save, graph, costs) == 0.5 + 16 / 8
    assert action_seconds(beside, graph, costs) == 0.5 + 16 / 4
    # Nothing is known of both at once where state leaves as fast as ever.
    costs = replace(costs, rates=replace(rates, state_out=PerRank(9.0)))
    assert action_seconds(beside, graph, costs) == 0.5 + 16 / 8


def test_reductions_overlap_the_backward_of_earlier_layers() -> None:
    kinds = {name: replace(cost, reduce=1.5) for name, cost in PASSES.items()}
    costs = replace(IDEAL, kinds=kinds)
    graph = toy_graph(Strategy(dp=2), blocks=4, units=1, deferred=False)
    timeline = simulate(lower(graph, placed(graph)), graph, costs)
    # The head's reduction and those of blocks 4 to 2 hide; block 1's and the embedding's do not.
    assert timeline.seconds == pytest.approx(4 + 8 + 1.5 + 1.5, abs=TINY)
    assert timeline.busy()[Lane.COMM.value] == pytest.approx(6 * 1.5)


def test_compute_that_collectives_slow_takes_longer() -> None:
    graph = toy_graph(Strategy(dp=2), blocks=4, units=3)
    slowed = KindCost(0.125, 0.25, slowed=Slowed(0.125, 0.25))
    kinds = PASSES | {"block": BLOCK.exchanging(slowed)}
    programs = lower(graph, placed(graph))
    usual, slower = (
        simulate(programs, graph, replace(IDEAL, kinds=found)).seconds for found in (PASSES, kinds)
    )
    assert slower == pytest.approx(usual + 4 * 3 * 0.375, abs=TINY)
    assert kinds["block"].exchanging(BLOCK) == BLOCK


def test_a_deadlock_is_reported() -> None:
    graph = toy_graph(Strategy(dp=1, pp=2), units=2)
    first, last = lower(graph, placed(graph))
    unsent = tuple(a for a in expand(first.step) if a.op is not Op.SEND)
    programs = [replace(first, step=unsent), last]
    with pytest.raises(VerificationError, match="wait for messages that are never sent"):
        simulate(programs, graph, IDEAL)
    with pytest.raises(VerificationError, match="wait for messages that are never sent"):
        step_seconds(programs, graph, IDEAL)


def test_stages_that_wait_for_each_other_are_a_deadlock() -> None:
    graph = toy_graph(Strategy(dp=1, pp=2), units=1)
    first, last = lower(graph, placed(graph))
    actions = list(expand(first.step))
    receive = next(a for a in actions if a.op is Op.RECV)
    actions.remove(receive)
    programs = [replace(first, step=(receive, *actions)), last]
    with pytest.raises(VerificationError, match=r"stages \[0, 1\] wait"):
        simulate(programs, graph, IDEAL)


def _shared(program: Program) -> set[Lane]:
    """The lanes that share a link with another."""
    lanes = {action.lane for action in expand(program.step)} & set(LINKS)
    return lanes | {LINKS[lane] for lane in lanes}


class _Player:
    """The graph that `order_of` gives, played: each lane a queue, nothing else waited for."""

    def __init__(self, program: Program) -> None:
        self.order = order_of(program.buffers, expand(program.step))
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.lanes: dict[Lane, float] = defaultdict(float)
        self.busy: dict[Lane, list[tuple[float, float]]] = defaultdict(list)
        self.shared = _shared(program)

    def _copied(self, lane: Lane, start: float, seconds: float) -> float:
        """The end of a copy over a link that others use: it has what they have left of it."""
        busy, time, left = self.busy[LINKS.get(lane, lane)], start, seconds
        for low, high in sorted(busy):
            if time + left <= low + 1e-9 * seconds:  # what is left by rounding is nothing
                break
            if high >= time:
                left -= max(0.0, low - time)
                time = high
        busy.append((start, time + left))
        return time + left

    def play(self, sent: dict[Message, float], case: Case) -> bool:
        """Go on until a message is missing; whether anything was done."""
        before = len(self.ends)
        for action, waits in self.order[before:]:
            start = self.lanes[action.lane]
            if action.op is Op.RECV:
                key = action.writes[0].content, action.micro_batch
                if key not in sent:
                    break
                start = max(start, sent[key])
            start = max([start, *(self.ends[number] for number in waits)])
            seconds = action_seconds(action, case.graph, case.costs)
            alone = action.lane not in self.shared
            end = start + seconds if alone else self._copied(action.lane, start, seconds)
            self.starts.append(start)
            self.ends.append(end)
            self.lanes[action.lane] = end
            if action.op is Op.SEND:
                sent[action.reads[0].content, action.micro_batch] = end
        return len(self.ends) > before


@settings(max_examples=examples(80))
@given(cases(free=True))
def test_events_are_those_of_a_plain_player(case: Case) -> None:
    players, sent = [_Player(program) for program in case.programs], dict[Message, float]()
    while sum(player.play(sent, case) for player in players):  # all of them get a turn
        pass
    for stage, player in enumerate(players):
        expected = [
            (action.op, action.layer, action.micro_batch, start, end)
            for (action, _), start, end in zip(
                player.order, player.starts, player.ends, strict=True
            )
            if action.op is not Op.FREE
        ]
        events = [e for e in case.timeline.events if e.stage == stage]
        assert [(e.op, e.layer, e.micro_batch) for e in events] == [e[:3] for e in expected]
        times = [time for *_, start, end in expected for time in (start, end)]
        rounding = 1e-9 if player.shared else 0.0  # the same gaps, added up in another order
        found = [time for event in events for time in (event.start, event.end)]
        assert found == pytest.approx(times, rel=rounding, abs=0.0)


@settings(max_examples=examples(60))
@given(cases(free=True))
def test_lanes_are_queues_and_seconds_are_conserved(case: Case) -> None:
    timeline, programs = case.timeline, case.programs
    for program in programs:
        by_lane: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in timeline.events:
            if event.stage == program.stage:
                by_lane[event.lane].append((event.start, event.end))
        spent: dict[str, float] = defaultdict(float)
        for action in expand(program.step):
            spent[action.lane] += action_seconds(action, case.graph, case.costs)
        for lane, times in by_lane.items():
            assert all(end <= start for (_, end), (start, _) in pairwise(times))
            # Durations are differences of sums of floats: a few ulps of the step each.
            total = sum(end - start for start, end in times)
            if lane in _shared(program):  # others' copies come between
                assert total >= spent[lane] * (1 - 1e-9)
            else:
                assert total == pytest.approx(spent[lane], rel=1e-9, abs=1e-9)
    assert timeline.seconds == max(event.end for event in timeline.events)


def unstreamed(placement: Placement) -> Placement:
    stages = []
    for stage in placement.stages:
        kinds = {k: rows.model_copy(update={"streamed": 0.0}) for k, rows in stage.kinds.items()}
        stages.append(StagePlacement(kinds=kinds))
    return placement.model_copy(update={"stages": tuple(stages)})


@settings(max_examples=examples(60))
@given(cases(free=True), st.sampled_from([field.name for field in fields(Rates)]))
def test_a_faster_link_never_slows_a_program_down(case: Case, name: str) -> None:
    # Who has a shared link first may come to be another, who was waited for less: nothing streams.
    case = replace(case, placement=unstreamed(case.placement))
    rates = case.costs.rates
    better = PerRank(getattr(rates, name) * 2 if name != "latency" else 0.0)
    costs = replace(case.costs, rates=replace(rates, **{name: better}))
    faster = simulate(case.programs, case.graph, costs)
    # Start times are maxima of sums of durations, so they fall with them; sums round.
    assert faster.seconds <= case.timeline.seconds * (1 + 1e-12)


@settings(max_examples=examples(60))
@given(cases(), st.integers(1, 40))
def test_seconds_without_events_are_the_same(case: Case, more: int) -> None:
    """`step_seconds` leaves out repetitions that shift every time alike."""
    group = case.graph.strategy.accumulation_group
    graph = replace(case.graph, micro_batches=case.graph.micro_batches + more * group)
    programs = lower(graph, case.placement)
    timeline = simulate(programs, graph, case.costs)
    # Shifts equal to 1e-9 are taken for equal; over fewer than 50 repetitions that is 5e-8.
    seconds = step_seconds(programs, graph, case.costs)
    assert seconds == timeline.seconds
    assert seconds == pytest.approx(max(event.end for event in timeline.events), rel=1e-7)
    if any(_shared(program) for program in programs):
        return  # events of copies that take turns last longer than what they move takes
    totals = total_seconds(programs, graph, case.costs)
    assert totals.by_lane == pytest.approx(timeline.busy(), rel=1e-9, abs=1e-9)
    by_op = timeline.total_by(lambda event: event.op)
    assert totals.by_op == pytest.approx(by_op, rel=1e-9, abs=1e-9)
    by_stage = timeline.total_by(lambda event: str(event.stage))
    assert totals.serial == pytest.approx(max(by_stage.values()))


@pytest.mark.parametrize(
    ("action", "seconds"),
    [
        (Action(Op.LOAD, Lane.H2D, 1, amount=50), 0.25 + 50 / 100),
        (Action(Op.READ, Lane.NVME_READ, 1, amount=50), 0.25 + 50 / 50),
        (Action(Op.STATE_IN, Lane.STATE_IN, 1, amount=50), 0.25 + 50 / 80),
        (Action(Op.STATE_OUT, Lane.STATE_OUT, 1, amount=50), 0.25 + 50 / 80),
        (Action(Op.UPDATE, Lane.CPU, 1, amount=50, share=Share.HOST), 50 / 100),
        (Action(Op.UPDATE, Lane.GPU_UPDATE, 1, amount=50, share=Share.STREAMED), 50 / 1000),
        (Action(Op.UPDATE, Lane.COMPUTE, 1, amount=50, share=Share.GPU), 50 / 1000),
        (Action(Op.NORM, Lane.CPU, 1, amount=40), 40 / 400),
        (Action(Op.ACCUMULATE, Lane.COMPUTE, 1, amount=40), 3 * 40 / 1000),
        (Action(Op.FORWARD, Lane.COMPUTE, 1), 1.0),
        (Action(Op.BACKWARD, Lane.COMPUTE, 1), 2.0),
        (Action(Op.BACKWARD, Lane.COMPUTE, 1, recompute=Recompute.FULL), 3.0),
        (Action(Op.BACKWARD, Lane.COMPUTE, 1, recompute=Recompute.SELECTIVE), 2.25),
        (Action(Op.REDUCE, Lane.COMM, 1, amount=7), 0.5),
        (Action(Op.TENSOR_REDUCE, Lane.COMPUTE, 1, amount=7), 0.2),
        (Action(Op.GATHER, Lane.COMM, 1, amount=7), 0.3),
        (Action(Op.SEND, Lane.SEND, 1, (_ref(Holds.HIDDEN),), amount=7), 0.1),
        (Action(Op.SEND, Lane.SEND, 0, (_ref(Holds.PARAMETERS),), amount=7), 0.7),
        (Action(Op.SEND, Lane.SEND, 0, (_ref(Holds.PARTIAL_GRADIENTS),), amount=7), 0.9),
        (Action(Op.RECV, Lane.RECV, 1, amount=7), 0.0),
        (Action(Op.FREE, Lane.COMPUTE, 1), 0.0),
        (Action(Op.CLIP, Lane.CPU, 1), 0.0),
    ],
    ids=lambda value: f"{value.op}-{value.lane}" if isinstance(value, Action) else "",
)
def test_prices_of_actions(action: Action, seconds: float) -> None:
    costs = replace(COSTS, rates=replace(COSTS.rates, latency=0.25), table=(0.7, 0.9))
    assert action_seconds(action, toy_graph(), costs) == pytest.approx(seconds)


def test_a_resident_update_takes_at_least_its_launches() -> None:
    """Two seconds, and a tenth of one for each element."""
    graph = toy_graph()
    block = replace(COSTS.kinds["block"], update_launch=UpdateLaunch(2.0, 0.1))
    costs = replace(COSTS, kinds={**COSTS.kinds, "block": block})
    rate = float(costs.rates.gpu_update)
    resident = Action(Op.UPDATE, Lane.COMPUTE, 1, amount=36, share=Share.GPU)
    assert action_seconds(resident, graph, costs) == max(2.0 + 3.6, 36 / rate)
    assert action_seconds(resident, graph, COSTS) == 36 / rate
    streamed = resident._replace(share=Share.STREAMED)
    assert action_seconds(streamed, graph, costs) == 36 / rate
