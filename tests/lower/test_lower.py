"""Any legal placement becomes a program that keeps every rule, and says exactly what it should."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings

from bigplan.content import Content, Holds
from bigplan.graph.graph import ElementSizes, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.layer_placement import pieces
from bigplan.lower import lower, lower_stage
from bigplan.lower.refs import BATCH
from bigplan.placement import Share, Tier
from bigplan.program import Action, Lane, Op, Repeat, expand
from bigplan.spec.sharing import NodeSharing
from bigplan.verify import verify
from tests.examples import examples
from tests.toys import ROOMY, Case, cases, instructions, kind_placement, placed, toy_graph

GRADIENTS, PART = Content(Holds.GRADIENTS, 0), Content(Holds.PARTIAL_GRADIENTS, 1)


def _reads(action: Action, content: Content) -> bool:
    return any(ref.content == content for ref in action.reads)


def _ops(actions: tuple[Action | Repeat, ...]) -> list[str]:
    """`op layer.micro-batch`, frees and batches left out."""
    return [
        f"{a.op} {a.layer}" + (f".{a.micro_batch}" if a.micro_batch >= 0 else "")
        for a in expand(actions)
        if a.op not in (Op.FREE, Op.DATA)
    ]


@settings(max_examples=examples(120))
@given(cases(free=True))
def test_any_legal_placement_verifies_and_simulates(case: Case) -> None:
    programs = case.programs
    verify(programs, case.graph, ROOMY, NodeSharing(1))
    timeline = case.timeline
    compute = [event for event in timeline.events if event.op in ("forward", "backward")]
    assert len(compute) == 2 * len(case.graph.layers) * case.graph.micro_batches
    assert timeline.seconds > 0


@settings(max_examples=examples(60))
@given(cases(free=True))
def test_every_row_is_updated_once_and_moves_match_the_layout(case: Case) -> None:
    graph, sizes = case.graph, case.graph.sizes
    split = graph.strategy.zero_ranks
    for program in case.programs:
        updated: Counter[tuple[int, Share]] = Counter()
        moved: Counter[tuple[int, Op]] = Counter()
        for action in expand(program.step):
            if action.op is Op.UPDATE:
                assert action.share is not None
                updated[action.layer, action.share] += action.amount
            elif action.share is not None:
                moved[action.layer, action.op] += action.amount
        for layer, at in program.layers.items():
            kind = graph.kinds[graph.layers[layer]]
            for share in Share:
                piece = len(pieces(kind, at, split)[share])
                chunks = program.buffers[f"o{layer}.{share}"].count if piece else 1
                # Chunks are of equal size, so all but one may round up by an element.
                assert piece <= updated[layer, share] <= piece + chunks - 1
            assert moved[layer, Op.READ] == updated[layer, Share.NVME] * sizes.state
            streamed, rest = updated[layer, Share.STREAMED], 0 if sizes.master else sizes.parameter
            gradients = 0 if at.gradients is Tier.GPU else sizes.gradient
            back = 0 if at.parameters is Tier.GPU else sizes.parameter
            into = sizes.state + gradients + min(rest, back)
            assert moved[layer, Op.STATE_IN] == streamed * into
            assert moved[layer, Op.STATE_OUT] == streamed * (sizes.state + back)


def test_everything_on_the_gpu_moves_nothing() -> None:
    graph = toy_graph(blocks=1, units=2, deferred=False)
    (program,) = lower(graph, placed(graph))
    assert _ops(program.step) == [
        *(
            "forward 0.0",
            "forward 1.0",
            "forward 2.0",
            "backward 2.0",
            "backward 1.0",
            "backward 0.0",
        ),
        *("forward 0.1", "forward 1.1", "forward 2.1"),
        *("backward 2.1", "update 2", "backward 1.1", "update 1", "backward 0.1", "update 0"),
    ]
    assert _ops(program.first) == _ops(program.step)
    assert program.flush == ()
    assert {action.lane for action in expand(program.step)} == {Lane.COMPUTE, Lane.DATA}


def test_a_clipped_step_updates_before_the_forward_of_the_next() -> None:
    graph = toy_graph(blocks=1, units=1)
    (program,) = lower(graph, placed(graph))
    passes = [
        *("backward 2.0", "norm 2", "backward 1.0", "norm 1", "backward 0.0", "norm 0", "clip 2")
    ]
    assert _ops(program.first) == ["forward 0.0", "forward 1.0", "forward 2.0", *passes]
    assert _ops(program.step) == [
        *("update 0", "forward 0.0", "update 1", "forward 1.0", "update 2", "forward 2.0"),
        *passes,
    ]
    assert _ops(program.flush) == ["update 0", "update 1", "update 2"]


def test_a_streamed_layer_on_disk_passes_through_host_and_slot() -> None:
    graph = toy_graph(blocks=1, units=1, deferred=False)
    away = kind_placement(1, Tier.NVME, Tier.NVME, (Recompute.FULL, Tier.NVME), optimizer=Tier.NVME)
    (program,) = lower(graph, placed(graph, block=away))
    mine = [text for text in _ops(program.step) if text.split()[1].startswith("1")]
    assert mine == [
        *("read 1", "load 1", "forward 1.0", "save 1.0", "write 1.0"),
        *("read 1.0", "fetch 1.0", "backward 1.0", "grad_out 1", "write 1"),
        *("read 1", "read 1", "update 1", "write 1", "write 1"),  # gradients, state; both back
    ]
    moved = Counter[tuple[Op, int]]()
    for action in expand(program.step):
        if action.layer == 1:
            moved[action.op, action.amount] += 1
    # 36 elements: 72 bytes of parameters, 144 of gradients, 432 of state; 16 of a boundary.
    assert moved[Op.READ, 72] == 1
    assert moved[Op.READ, 144] == moved[Op.READ, 432] == 1
    assert moved[Op.WRITE, 72] == moved[Op.WRITE, 144] == moved[Op.WRITE, 432] == 1
    assert moved[Op.SAVE, 16] == moved[Op.FETCH, 16] == 1
    again = {a.layer: a.recompute for a in expand(program.step) if a.op is Op.BACKWARD}
    assert again == {0: Recompute.NONE, 1: Recompute.FULL, 2: Recompute.NONE}


def test_the_last_layer_of_a_ring_stays_there() -> None:
    graph = toy_graph(Strategy(dp=1, accumulation_group=2), blocks=3, units=1)
    away = kind_placement(3, Tier.HOST, Tier.HOST, (Recompute.FULL, Tier.HOST), Tier.HOST)

    def moves(slots: int, units: int = 1) -> list[str]:
        several = replace(graph, micro_batches=2 * units)
        (program,) = lower(several, placed(several, slots, block=away))
        verify((program,), several, ROOMY, NodeSharing(1))
        homes = [f"a{i}" for i in (1, 2, 3) if f"a{i}" in program.buffers]
        shared = [name for name in homes if program.buffers[name].within]
        assert homes == (["a1", "a2", "a3"] if slots == 1 else ["a1", "a2"])
        assert shared == (homes if units == 1 else [])
        ops = (Op.SAVE, Op.FETCH)
        return [f"{a.op} {a.layer}.{a.micro_batch}" for a in expand(program.step) if a.op in ops]

    saves = ["save 1.0", "save 1.1", "save 2.0", "save 2.1"]
    fetches = ["fetch 2.0", "fetch 2.1", "fetch 1.0", "fetch 1.1"]
    assert moves(3) == moves(2) == [*saves, *fetches]
    assert moves(1) == [*saves, "save 3.0", "save 3.1", "fetch 3.0", "fetch 3.1", *fetches]
    assert len(moves(3, units=4)) == 4 * 8


def test_activations_that_leave_while_the_cpu_updates_say_so() -> None:
    graph = toy_graph(blocks=6, units=2)

    def beside(optimizer: Tier, *, deferred: bool = True) -> list[str]:
        block = kind_placement(6, activations=(Recompute.FULL, Tier.HOST), optimizer=optimizer)
        of = replace(graph, deferred=deferred)
        (program,) = lower(of, placed(of, slots=2, block=block))
        saves = [action for action in expand(program.step) if action.op is Op.SAVE]
        assert len(saves) == 2 * 5  # those of the last layer stay
        return [f"{a.layer}.{a.micro_batch}" for a in saves if a.beside_update]

    # A layer's update begins one layer ahead of its forward.
    assert beside(Tier.HOST) == ["1.0", "2.0", "3.0", "4.0"]
    assert beside(Tier.GPU) == beside(Tier.HOST, deferred=False) == []


def test_what_leads_to_nvme_leaves_its_ring() -> None:
    graph = toy_graph(blocks=2, units=1)
    ways = {Recompute.FULL: {Tier.HOST: 1, Tier.NVME: 1}}
    block = kind_placement(2).model_copy(update={"activations": ways})
    (program,) = lower(graph, placed(graph, block=block))
    assert [a.layer for a in expand(program.step) if a.op is Op.SAVE] == [1, 2]


def test_rows_of_a_table_on_the_host_move_alone() -> None:
    """Neither the table nor a sum of its gradients is ever on the GPU."""
    group = Strategy(dp=1, accumulation_group=2)
    graph = toy_graph(group, blocks=1, units=2, looked_up=8)
    table = kind_placement(1, Tier.HOST, Tier.HOST, optimizer=Tier.HOST)
    (program,) = lower(graph, placed(graph, embedding=table))
    mine = [text for text in _ops(program.step) if text.split()[1].startswith("0")]
    forward = [[f"look_up 0.{n}", f"load 0.{n}", f"forward 0.{n}"] for n in range(4)]
    backward = [[f"backward 0.{n}", f"grad_out 0.{n}", f"accumulate 0.{n}"] for n in range(4)]
    assert mine == [
        "update 0",
        *(text for unit in (0, 2) for each in (forward, backward) for n in (unit, unit + 1)
          for text in each[n]),
        "norm 0",
    ]  # fmt: skip
    actions = [action for action in expand(program.step) if action.layer == 0]
    # 16 bytes of tokens, behind them eight elements of rows in 16 bits.
    moved = {action.amount for action in actions if action.op in (Op.LOAD, Op.GRAD_OUT)}
    assert moved == {8 * 2 + 16}
    sums = [action for action in actions if action.op is Op.ACCUMULATE]
    assert [_reads(a, GRADIENTS) for a in sums] == [False, True, True, True]
    on_gpu = {name: b.nbytes for name, b in program.buffers.items() if b.tier is Tier.GPU}
    assert on_gpu["rows"] == 8 * 2 + 16
    assert not {"w0", "g0", "slot.embedding", "sum.embedding"} & set(on_gpu)


def test_a_table_whose_gradients_are_elsewhere_comes_whole() -> None:
    graph = toy_graph(blocks=1, looked_up=8)
    for gradients in (Tier.GPU, Tier.NVME):
        table = kind_placement(1, Tier.HOST, gradients, optimizer=Tier.HOST)
        (program,) = lower(graph, placed(graph, embedding=table))
        assert "slot.embedding" in program.buffers
        assert all(action.op is not Op.LOOK_UP for action in expand(program.step))


def test_a_slot_that_still_holds_the_layer_is_not_filled_again() -> None:
    graph = toy_graph(blocks=4, units=3, deferred=False)
    streamed = kind_placement(4, Tier.HOST, optimizer=Tier.HOST)
    loads = {
        slots: sum(
            action.op is Op.LOAD and action.share is None
            for program in lower(graph, placed(graph, slots=slots, block=streamed))
            for action in expand(program.step)
        )
        for slots in (1, 2, 3)
    }
    # Four layers there and back, three units: six passes, and at each turn what is in the slots
    # (the last ones of the pass before) is there already.
    assert loads == {slots: 6 * 4 - 5 * slots for slots in (1, 2, 3)}


def test_a_layer_major_group_loads_each_layer_once_a_pass() -> None:
    for group in (1, 8):
        graph = toy_graph(Strategy(dp=1, accumulation_group=group), units=8 // group)
        streamed = placed(graph, slots=1, block=kind_placement(4, Tier.HOST, optimizer=Tier.HOST))
        (program,) = lower(graph, streamed)
        loads = sum(a.op is Op.LOAD for a in expand(program.first))
        assert loads == 2 * 4 * (8 // group) - (2 * 8 // group - 1)


def test_a_thousand_micro_batches_are_not_a_thousand_copies() -> None:
    def written(units: int) -> int:
        graph = toy_graph(Strategy(dp=1, pp=4), blocks=8, units=units)
        return sum(len(list(instructions(program))) for program in lower(graph, placed(graph)))

    assert written(1000) == written(20)


def test_pipeline_messages_follow_one_forward_one_backward() -> None:
    graph = toy_graph(Strategy(dp=1, pp=2), blocks=2, units=3, deferred=False)
    first, last = lower(graph, placed(graph))
    order = [text for text in _ops(first.step) if text.split()[0] in ("send", "recv")]
    assert order == ["send 1.0", "send 1.1", "recv 1.0", "send 1.2", "recv 1.1", "recv 1.2"]
    order = [text for text in _ops(last.step) if text.split()[0] in ("send", "recv")]
    assert order == ["recv 2.0", "send 2.0", "recv 2.1", "send 2.1", "recv 2.2", "send 2.2"]
    assert lower_stage(graph, placed(graph), 1) == last


def test_zero_stages_reduce_and_gather_what_they_shard() -> None:
    counts = {}
    for zero in range(4):
        graph = toy_graph(Strategy(dp=2, zero=zero), blocks=1, units=3)
        (program,) = lower(graph, placed(graph, slots=1))
        ops = Counter(action.op for action in expand(program.step))
        counts[zero] = ops[Op.REDUCE], ops[Op.GATHER]
    # Three layers; gradients are reduced once, or in every unit where they are sharded. Sharded
    # parameters are gathered for forward and backward of every unit, unless the slot still has
    # them (the head's backward is part of its forward); after the update, once.
    assert counts[0] == (3, 0)
    assert counts[1] == (3, 3)
    assert counts[2] == (9, 3)
    assert counts[3][0] == 9
    assert counts[3][1] == 3  # a slot for each kind, which has one layer: gathered once a step


def test_experts_that_one_rank_has_are_not_among_what_is_exchanged() -> None:
    """64 elements of experts before 36 others, which four ranks fill up to 48."""
    for zero, others in enumerate((36, 48, 48, 48)):
        for ep, elements in ((4, others), (2, 64 + others)):
            graph = toy_graph(Strategy(dp=4, zero=zero, ep=ep), blocks=1)
            (program,) = lower(graph, placed(graph, slots=1))
            found = {(a.op, a.amount) for a in expand(program.step) if a.layer == 1}
            moved = {pair for pair in found if pair[0] in (Op.REDUCE, Op.GATHER)}
            expected = {(Op.REDUCE, elements * graph.sizes.gradient)}
            if zero:
                expected.add((Op.GATHER, elements * graph.sizes.parameter))
            assert moved == expected
    graph = toy_graph(Strategy(dp=4, ep=4), blocks=2, frozen=True)
    (program,) = lower(graph, placed(graph))
    (summed,) = (a.amount for a in expand(program.step) if a.op is Op.REDUCE)
    assert summed == 2 * (8 + 16) * graph.sizes.gradient  # two blocks' pairs, of no expert


def test_what_tensor_parallel_ranks_repeat_is_summed_once_or_before_it_leaves() -> None:
    for zero, times in enumerate((3, 3, 9, 9)):  # layers, in each unit where gradients are sharded
        graph = toy_graph(Strategy(dp=2, tp=2, zero=zero), blocks=1, units=3)
        (program,) = lower(graph, placed(graph))
        found = [action for action in expand(program.step) if action.op is Op.TENSOR_REDUCE]
        assert len(found) == times
        assert {action.amount for action in found} == {4 * graph.sizes.gradient}  # the vector
        assert {action.lane for action in found} == {Lane.COMPUTE}


def test_tied_tables_are_summed_over_both_layers() -> None:
    strategy = Strategy(dp=1, accumulation_group=2)
    graph = toy_graph(strategy, blocks=1, units=2, tied=True, deferred=False)
    head = kind_placement(1, gradients=Tier.HOST, optimizer=Tier.HOST)
    (program,) = lower(graph, placed(graph, head=head))
    adds = [
        (a.layer, a.micro_batch, _reads(a, GRADIENTS))
        for a in expand(program.step)
        if a.op is Op.BACKWARD and a.layer in (0, 2)
    ]
    # Only the step's very first backward of the head starts the table's sum.
    assert [item for item in adds if not item[2]] == [(2, 0, False)]


def test_gradient_accumulation_away_from_home_starts_each_unit_anew() -> None:
    graph = toy_graph(Strategy(dp=1, accumulation_group=2), blocks=1, units=2, deferred=False)
    away = kind_placement(1, gradients=Tier.HOST, optimizer=Tier.HOST)
    (program,) = lower(graph, placed(graph, block=away))
    starts = [
        a.micro_batch
        for a in expand(program.step)
        if a.op is Op.BACKWARD and a.layer == 1 and not _reads(a, PART)
    ]
    assert starts == [0, 2]
    ops = Counter(action.op for action in expand(program.step))
    assert (ops[Op.GRAD_OUT], ops[Op.ACCUMULATE]) == (2, 1)


def test_lowering_is_a_pure_function() -> None:
    graph = toy_graph(Strategy(dp=2, pp=2, zero=3))
    again = replace(graph)
    assert lower(graph, placed(graph)) == lower(again, placed(again))


def test_a_batch_comes_before_the_layer_that_asks_for_it() -> None:
    strategy = Strategy(dp=1, accumulation_group=2)
    graph = toy_graph(strategy, blocks=1, units=2, deferred=False)
    (program,) = lower(graph, placed(graph))
    data = program.buffers["data"]
    # Tokens and targets of 16 bytes each; the first layer takes a group before the loss ends one.
    assert (data.tier, data.nbytes, data.count) == (Tier.HOST, 32, 2)
    order = [(a.op, a.layer, a.micro_batch) for a in expand(program.step)]
    for number in range(4):
        came = order.index((Op.DATA, 0, number))
        assert order[came + 1] == (Op.FORWARD, 0, number)
    readers = {(a.op, a.layer) for a in expand(program.step) for ref in a.reads if ref == BATCH}
    assert readers == {(Op.FORWARD, 0), (Op.BACKWARD, 2)}


def test_a_pipeline_asks_for_tokens_first_and_for_targets_last() -> None:
    graph = toy_graph(Strategy(dp=1, pp=3), blocks=3, units=3)
    first, middle, last = lower(graph, placed(graph))
    assert {a.layer for a in expand(first.step) if a.op is Op.DATA} == {0}
    assert {a.layer for a in expand(last.step) if a.op is Op.DATA} == {4}
    assert "data" not in middle.buffers
    assert all(a.op is not Op.DATA for a in expand(middle.step))


def test_an_evaluation_passes_forward_alone() -> None:
    graph = toy_graph(blocks=2, units=2)
    streamed = kind_placement(2, Tier.HOST, Tier.HOST, (Recompute.NONE, Tier.HOST), Tier.HOST)
    (program,) = lower(graph, placed(graph, slots=1, block=streamed))
    once = ["load 1", "forward 0.{0}", "forward 1.{0}", "load 2", "forward 2.{0}", "forward 3.{0}"]
    assert _ops(program.evaluate) == [text.format(n) for n in (0, 1) for text in once]
    kinds = {ref.content.kind for a in expand(program.evaluate) for ref in a.writes}
    assert Holds.ACTIVATIONS not in kinds


def test_an_evaluation_does_not_grow_with_its_units() -> None:
    def written(units: int) -> int:
        graph = toy_graph(Strategy(dp=1, pp=2), blocks=4, units=units)
        return sum(len(program.evaluate) for program in lower(graph, placed(graph)))

    assert written(100) == written(2)


def test_ends_that_share_a_slot_take_turns_even_with_more_slots_than_layers() -> None:
    graph = toy_graph(blocks=1, units=2)
    away = kind_placement(1, Tier.HOST, Tier.HOST, optimizer=Tier.HOST)
    placement = placed(graph, embedding=away, block=away, head=away)
    placement = placement.model_copy(update={"slots": 4, "shared_ends": True})
    verify(lower(graph, placement), graph, dict.fromkeys(Tier, 10**9), NodeSharing(1))


def test_updates_without_state_move_none_of_it() -> None:
    """SGD in fp32 without momentum: the CPU's rows are one piece, wherever their state would be."""
    sizes = ElementSizes(parameter=4, gradient=4, state=0, master=False)
    graph = replace(toy_graph(blocks=2, units=1), sizes=sizes)
    rows = {Tier.GPU: 0.5, Tier.HOST: 0.5, Tier.NVME: 1.0}
    block = kind_placement(2).model_copy(update={"optimizer": rows, "streamed": 0.25})
    (program,) = lower(graph, placed(graph, block=block))
    gone = ("o", "stage.o", "stream")
    assert not [name for name in program.buffers if name.startswith(gone)]
    for layer in (1, 2):
        updates = [a for a in expand(program.flush) if a.op is Op.UPDATE and a.layer == layer]
        assert sum(action.amount for action in updates) == graph.kinds["block"].parameters
        assert len({action.lane for action in updates}) == len(updates)
    verify((program,), graph, dict.fromkeys(Tier, 10**9), NodeSharing(1))
