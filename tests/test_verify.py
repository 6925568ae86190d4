"""Each kind of broken program is rejected, by the rule that it breaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.content import ADAPTERS, Content, HeldContent, Holds
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.placement import Placement, Share, Tier
from bigplan.program import Action, Lane, Op, Program, Repeat, entry, expand, held
from bigplan.spec.sharing import NodeSharing
from bigplan.verify import CHANGES, used_bytes, verify
from tests.examples import examples
from tests.toys import ROOMY, Case, cases, kind_placement, placed, toy_graph

Actions = tuple[Action, ...]
Edit = Callable[[Actions], Actions]
WEIGHTS = Content(Holds.PARAMETERS, 1)
PARTS = ("first", "step", "flush", "evaluate")


def _unrolled(program: Program) -> Program:
    for part in PARTS:
        program = _with(program, part, tuple(expand(getattr(program, part))))
    return program


def _with(program: Program, part: str, actions: Actions) -> Program:
    # A checkpoint is a step with more in it: left as it was, it would show any change of the step.
    change: dict[str, Any] = {"checkpoint": (), "save": (), part: actions}
    return replace(program, **change)


def _find(actions: Actions, op: Op, layer: int | None = None, number: int = 0) -> int:
    found = [i for i, a in enumerate(actions) if a.op is op and layer in (None, a.layer)]
    return found[number]


def _second_batch_first(actions: Actions) -> Actions:
    i = _find(actions, Op.DATA, number=1)
    return (actions[i], *actions[:i], *actions[i + 1 :])


def _drop(op: Op, layer: int | None = None, number: int = 0) -> Edit:
    def edit(actions: Actions) -> Actions:
        i = _find(actions, op, layer, number)
        return actions[:i] + actions[i + 1 :]

    return edit


def _repeat(op: Op, layer: int | None = None) -> Edit:
    def edit(actions: Actions) -> Actions:
        i = _find(actions, op, layer)
        return actions[: i + 1] + actions[i:]

    return edit


def _swap(op: Op, other: Op, layer: int | None = None) -> Edit:
    def edit(actions: Actions) -> Actions:
        i, j = _find(actions, op, layer), _find(actions, other, layer)
        changed = list(actions)
        changed[i], changed[j] = changed[j], changed[i]
        return tuple(changed)

    return edit


def _change(op: Op, layer: int | None = None, **fields: Any) -> Edit:
    def edit(actions: Actions) -> Actions:
        i = _find(actions, op, layer)
        return (*actions[:i], actions[i]._replace(**fields), *actions[i + 1 :])

    return edit


def _before(op: Op, last: Op, layer: int) -> Edit:
    """The layer's action comes before the last of others of its."""

    def edit(actions: Actions) -> Actions:
        i = _find(actions, op, layer)
        j = max(at for at, a in enumerate(actions) if a.op is last and a.layer == layer)
        assert j < i
        return (*actions[:j], actions[i], *actions[j:i], *actions[i + 1 :])

    return edit


def _move_to_end(op: Op, layer: int) -> Edit:
    def edit(actions: Actions) -> Actions:
        i = _find(actions, op, layer)
        return (*actions[:i], *actions[i + 1 :], actions[i])

    return edit


def _load_before_update(actions: Actions) -> Actions:
    """Fill layer 1's slot before the pending update of layer 1, instead of after it."""
    load, update = _find(actions, Op.LOAD, 1), _find(actions, Op.UPDATE, 1)
    assert update < load
    rest = actions[:load] + actions[load + 1 :]
    return (*rest[:update], actions[load], *rest[update:])


def _lent_early(actions: Actions) -> Actions:
    """The table is sent first of all."""
    i = _find(actions, Op.SEND, 0)
    return (actions[i], *actions[:i], *actions[i + 1 :])


def _free_early(actions: Actions) -> Actions:
    """Free layer 1's slot right before its forward reads it."""
    forward = _find(actions, Op.FORWARD, 1)
    weights = next(ref for ref in actions[forward].reads if ref.content == WEIGHTS)
    free = Action(Op.FREE, Lane.COMPUTE, 1, frees=(weights,))
    return (*actions[:forward], free, *actions[forward:])


def _swapped_messages(actions: Actions) -> Actions:
    """All work on the first two micro-batches trades places."""
    numbers = {0: 1, 1: 0}
    return tuple(a._replace(micro_batch=numbers.get(a.micro_batch, a.micro_batch)) for a in actions)


def _placement(graph: Graph) -> Placement:
    """One block of everything: streamed, offloaded, recomputed, updated on the CPU from disk."""
    away = kind_placement(2, Tier.HOST, Tier.HOST, (Recompute.FULL, Tier.HOST), optimizer=Tier.NVME)
    return placed(graph, slots=1, block=away)


def _streamed(graph: Graph) -> Placement:
    """Blocks at home in host memory whose whole state passes through the GPU."""
    away = kind_placement(2, Tier.HOST, Tier.HOST, optimizer=Tier.HOST)
    return placed(graph, block=away.model_copy(update={"streamed": 2.0}))


PLAIN = toy_graph(blocks=2, units=3)
PARALLEL = toy_graph(Strategy(dp=2), blocks=2, units=3)
SPLIT = toy_graph(Strategy(dp=2, tp=2), blocks=2, units=3)
SHARDED = toy_graph(Strategy(dp=2, zero=1), blocks=2, units=3)
HYBRID = toy_graph(Strategy(dp=4, zero=3, zero_group=2), blocks=2, units=3)
PIPELINE = toy_graph(Strategy(dp=1, pp=2), blocks=4, units=3)
LENT = toy_graph(Strategy(dp=2, pp=2, zero=1), blocks=4, units=3, tied=True)
UNCLIPPED = toy_graph(blocks=2, units=3, deferred=False)
GROUPED = toy_graph(Strategy(dp=1, accumulation_group=2), blocks=2)


@dataclass(frozen=True)
class Broken:
    """`edit` breaks a part of a stage's program; the message must contain `rule`."""

    rule: str
    edit: Edit
    graph: Graph = PLAIN
    placement: Placement | None = None
    part: str = "step"
    stage: int = 0


BROKEN = {
    "dropped send": Broken(
        "sends 2 messages of hidden states to stage 1, which receives 3", _drop(Op.SEND), PIPELINE
    ),
    "dropped send, first step": Broken(
        "sends 2 messages of hidden states", _drop(Op.SEND), PIPELINE, part="first"
    ),
    "table not lent": Broken(
        "stage 0: the step does not send parameters of layer 0 once", _drop(Op.SEND, 0), LENT
    ),
    "table not borrowed": Broken(
        "w0[0] holds nothing, not parameters of layer 0", _drop(Op.RECV, 0), LENT, stage=1
    ),
    "table not borrowed, validation": Broken(
        "w0[0] holds nothing, not parameters of layer 0",
        _drop(Op.RECV, 0),
        LENT,
        part="evaluate",
        stage=1,
    ),
    "table lent before its update": Broken(
        "changes parameters of layer 0, which another stage reads", _lent_early, LENT
    ),
    "table lent before it was gathered": Broken(
        "parameters of layer 0 are not gathered yet", _swap(Op.GATHER, Op.SEND, 0), LENT
    ),
    "table's gradients never handed back": Broken(
        "partial gradients of layer 0 were never used",
        _drop(Op.SEND, 0),
        LENT,
        stage=1,
    ),
    "table's gradients never added": Broken(
        "gradients of layer 0 are not reduced yet", _drop(Op.ACCUMULATE, 0), LENT
    ),
    "table's gradients added after the reduction": Broken(
        "gradients of layer 0 are not reduced yet", _swap(Op.ACCUMULATE, Op.REDUCE, 0), LENT
    ),
    "dropped receive": Broken(
        "h[0] holds nothing, not hidden states of layer 2, micro-batch 0",
        _drop(Op.RECV),
        PIPELINE,
        stage=1,
    ),
    "repeated receive": Broken("which receives 4", _repeat(Op.RECV), PIPELINE, stage=1),
    "reordered messages": Broken("or in another order", _swapped_messages, PIPELINE, stage=1),
    "collective on another lane": Broken(
        "collectives of one communicator on lanes data-parallel network, gpu compute",
        _change(Op.REDUCE, 2, lane=Lane.COMPUTE),
        PARALLEL,
    ),
    "gradients not reduced": Broken(
        "partial gradients of layer 1 are not reduced yet", _drop(Op.REDUCE, 1), PARALLEL
    ),
    "gradients reduced twice": Broken(
        "partial gradients of layer 1 are reduced twice", _repeat(Op.REDUCE, 1), PARALLEL
    ),
    "gradients not summed over zero groups": Broken(
        "gradients of layer 1 are not reduced yet",
        _drop(Op.SUM_REPLICAS, 1),
        HYBRID,
        placed(HYBRID),
    ),
    "gradients summed over zero groups twice": Broken(
        "gradients of layer 1 are reduced twice",
        _repeat(Op.SUM_REPLICAS, 1),
        HYBRID,
        placed(HYBRID),
    ),
    "gradients summed over zero groups before the last are added": Broken(
        "adds gradients of layer 1 of this zero group to those of all groups",
        _before(Op.SUM_REPLICAS, Op.ACCUMULATE, 1),
        HYBRID,
        placed(HYBRID),
    ),
    "repeated gradients not summed": Broken(
        "partial gradients of layer 1 are not reduced yet", _drop(Op.TENSOR_REDUCE, 1), SPLIT
    ),
    "repeated gradients not summed before the others": Broken(
        "partial gradients of layer 1 are not reduced yet",
        _swap(Op.TENSOR_REDUCE, Op.REDUCE, 1),
        SPLIT,
    ),
    "repeated gradients summed twice": Broken(
        "partial gradients of layer 1 are reduced twice", _repeat(Op.TENSOR_REDUCE, 1), SPLIT
    ),
    "repeated gradients summed on another lane": Broken(
        "collectives of one communicator on lanes data-parallel network, gpu compute",
        _change(Op.TENSOR_REDUCE, 2, lane=Lane.COMM),
        SPLIT,
    ),
    "parameters not gathered": Broken(
        "parameters of layer 1 are not gathered yet", _drop(Op.GATHER, 1), SHARDED
    ),
    "parameters not gathered, flush": Broken(
        "after the flush, parameters of layer 1 still wait for gather",
        _drop(Op.GATHER, 1),
        SHARDED,
        part="flush",
    ),
    "use after free": Broken("holds nothing, not parameters of layer 1", _free_early),
    "read before load": Broken("holds nothing, not parameters of layer 1", _drop(Op.LOAD, 1)),
    "activation never saved": Broken(
        "a1[0] holds nothing, not activations of layer 1, micro-batch 0", _drop(Op.SAVE, 1)
    ),
    "activation never fetched": Broken(
        "holds nothing, not activations of layer 1, micro-batch 0", _drop(Op.FETCH, 1)
    ),
    "slot filled before the update": Broken(
        "holds nothing, not parameters of layer 1", _load_before_update
    ),
    "update dropped": Broken(
        "in the step, layer 3 updates 0 of its 36 elements, in 0 of 1", _drop(Op.UPDATE, 3)
    ),
    "update dropped, flush": Broken("in the flush, layer 3", _drop(Op.UPDATE, 3), part="flush"),
    "update repeated": Broken("updates 72 of its 36 elements, in 2 of 1", _repeat(Op.UPDATE, 3)),
    "update of too few rows": Broken(
        "updates 35 of its 36 elements", _change(Op.UPDATE, 3, amount=35)
    ),
    "update before the norm": Broken(
        "the first step updates before any norm is known",
        lambda a: (*a, Action(Op.UPDATE, Lane.COMPUTE, 3, amount=36)),
        part="first",
    ),
    "updated state not written back": Broken(
        "after the step, o1.nvme[0] lacks the newest optimizer state of layer 1 (nvme, chunk 0)",
        _drop(Op.WRITE, 1),
    ),
    "updated state not written back, flush": Broken(
        "after the flush, o1.nvme[0] lacks the newest optimizer state of layer 1 (nvme, chunk 0)",
        _drop(Op.WRITE, 1),
        part="flush",
    ),
    "streamed state not brought": Broken(
        "stream[0] holds nothing, not optimizer state of layer 1 (streamed, chunk 0)",
        _drop(Op.STATE_IN, 1),
        placement=_streamed(PLAIN),
    ),
    "streamed state not taken back": Broken(
        "o1.streamed[0] lacks the newest optimizer state of layer 1 (streamed, chunk 0)",
        _drop(Op.STATE_OUT, 1),
        placement=_streamed(PLAIN),
    ),
    "streamed state taken back before its update": Broken(
        "stream[0] holds nothing, not optimizer state of layer 1 (streamed, chunk 0)",
        _swap(Op.UPDATE, Op.STATE_OUT, 1),
        placement=_streamed(PLAIN),
    ),
    "backward before forward": Broken("runs before its forward", _swap(Op.FORWARD, Op.BACKWARD, 3)),
    "missing micro-batch": Broken(
        "missing, repeated or foreign work: (<Op.BACKWARD: 'backward'>, 0, 2)",
        _drop(Op.BACKWARD, 0, 2),
        UNCLIPPED,
    ),
    "repeated micro-batch": Broken("missing, repeated or foreign work", _repeat(Op.BACKWARD, 0)),
    "foreign layer": Broken(
        "missing, repeated or foreign work", lambda a: (*a, _foreign(a)), UNCLIPPED
    ),
    "norm of a layer forgotten": Broken(
        "n1[0] holds nothing, not square sum of layer 1", _drop(Op.NORM, 1)
    ),
    "no clip factor": Broken(
        "the first step computes 0 clip factors, not 1", _drop(Op.CLIP), part="first"
    ),
    "clip factor of the step before": Broken(
        "the step computes 0 clip factors, not 1", _drop(Op.CLIP)
    ),
    "a unit's gradients never added": Broken(
        "overwrites partial gradients of layer 1, never used", _drop(Op.ACCUMULATE, 1, 0)
    ),
    "the last unit's gradients never added": Broken(
        "partial gradients of layer 0 were never used",
        _drop(Op.ACCUMULATE, 0, 1),
        UNCLIPPED,
        placed(UNCLIPPED, embedding=kind_placement(1, gradients=Tier.HOST, optimizer=Tier.HOST)),
    ),
    "the sum started again": Broken(
        "overwrites gradients of layer 3, never used", lambda a: _started_again(a, 3)
    ),
    "a batch never came": Broken(
        "data[0] holds nothing, not batch, micro-batch 0", _drop(Op.DATA, 0)
    ),
    "a batch came twice": Broken("4 batches in this order: [0, 0, 1]", _repeat(Op.DATA, 0)),
    "batches in another order": Broken(
        "4 batches in this order: [1, 0, 2]",
        _second_batch_first,
        GROUPED,
    ),
    "a forward without its batch": Broken(
        "forward of layer 0, micro-batch 0: does not read its batch",
        lambda a: _without_batch(a, Op.FORWARD),
    ),
    "a loss without its targets": Broken(
        "backward of layer 3, micro-batch 0: does not read its batch",
        lambda a: _without_batch(a, Op.BACKWARD),
    ),
    "a validation without its loss": Broken(
        "does not pass every layer once, forward", _drop(Op.FORWARD, 3), part="evaluate"
    ),
    "unknown buffer": Broken(
        "buffer 'nowhere' does not exist", lambda a: _renamed(a, "slot.block", "nowhere")
    ),
    "another share's rows": Broken(
        "update of layer 1, micro-batch -1: rows of gpu in w1 are not its own",
        lambda a: _with_rows(a, Share.GPU),
        part="flush",
    ),
}


def _with_rows(actions: Actions, share: Share) -> Actions:
    i = _find(actions, Op.UPDATE, 1)
    refs = tuple(ref._replace(rows=share) if ref.rows else ref for ref in actions[i].writes)
    assert refs != actions[i].writes
    return _change(Op.UPDATE, 1, writes=refs)(actions)


def _without_batch(actions: Actions, op: Op) -> Actions:
    return tuple(
        a._replace(reads=tuple(ref for ref in a.reads if ref.content.kind is not Holds.BATCH))
        if a.op is op
        else a
        for a in actions
    )


def _foreign(actions: Actions) -> Action:
    forward = actions[_find(actions, Op.FORWARD, 0)]
    return forward._replace(micro_batch=99)


def _started_again(actions: Actions, layer: int) -> Actions:
    i = _find(actions, Op.BACKWARD, layer, 1)
    reads = tuple(ref for ref in actions[i].reads if ref.content != Content(Holds.GRADIENTS, layer))
    return (*actions[:i], actions[i]._replace(reads=reads), *actions[i + 1 :])


def _renamed(actions: Actions, old: str, new: str) -> Actions:
    return tuple(
        a._replace(reads=tuple(r._replace(buffer=new) if r.buffer == old else r for r in a.reads))
        for a in actions
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_rejected_by_its_rule(name: str) -> None:
    broken = BROKEN[name]
    placement = broken.placement or _placement(broken.graph)
    programs = [_unrolled(program) for program in lower(broken.graph, placement)]
    verify(programs, broken.graph, ROOMY, NodeSharing(1))
    whole = programs[broken.stage]
    part = broken.edit(getattr(whole, broken.part))
    programs[broken.stage] = _with(whole, broken.part, part)
    with pytest.raises(VerificationError) as error:
        verify(programs, broken.graph, ROOMY, NodeSharing(1))
    assert broken.rule in str(error.value)


def _first_before_its_update(actions: Actions) -> Actions:
    i = _find(actions, Op.CKPT)
    return (actions[i], *actions[:i], *actions[i + 1 :])


BROKEN_CHECKPOINTS: dict[str, tuple[str, str, Edit]] = {
    "a piece not written": ("checkpoint", "does not write once: o1.", _drop(Op.CKPT, 1)),
    "a piece written twice": ("save", "does not write once: o1.", _repeat(Op.CKPT, 1)),
    "written before its update": (
        "checkpoint",
        "changes what a checkpoint has read already",
        _first_before_its_update,
    ),
    "another step": (
        "checkpoint",
        "without its CKPTs the checkpoint is another program",
        _drop(Op.FORWARD, 1),
    ),
    "training while saving": (
        "save",
        "without its CKPTs the save is another program",
        lambda a: (*a, Action(Op.FREE, Lane.CPU, 0)),
    ),
}


@pytest.mark.parametrize("name", BROKEN_CHECKPOINTS)
@pytest.mark.parametrize("deferred", [False, True])
def test_a_broken_checkpoint_is_rejected(name: str, deferred: bool) -> None:
    part, rule, edit = BROKEN_CHECKPOINTS[name]
    graph = replace(PLAIN, deferred=deferred)
    (plain,) = lower(graph, _placement(graph))
    program = replace(
        plain, step=tuple(expand(plain.step)), checkpoint=tuple(expand(plain.checkpoint))
    )
    verify((program,), graph, ROOMY, NodeSharing(1))
    broken: dict[str, Any] = {part: edit(getattr(program, part))}
    with pytest.raises(VerificationError, match=rule):
        verify((replace(program, **broken),), graph, ROOMY, NodeSharing(1))


@given(cases(free=True))
def test_every_program_can_be_checkpointed(case: Case) -> None:
    """Also where no state has a master copy: then every layer's parameters are written too."""
    for program in case.programs:
        written = [action for action in expand(program.save) if action.op is Op.CKPT]
        assert all(action.lane is Lane.CHECKPOINT for action in written)
        parameters = {action.layer for action in written if action.share is None}
        trained = {ADAPTERS} if case.graph.frozen else set(program.layers)
        assert parameters == (set() if case.graph.sizes.master else trained)
        among = [action for action in expand(program.checkpoint) if action.op is Op.CKPT]
        assert sorted(among, key=repr) == sorted(written, key=repr)


# Moves that free nothing: doing them twice in a row copies the same bytes again.
COPIES = (Op.READ, Op.LOAD, Op.STATE_IN, Op.GRAD_OUT, Op.PARAM_OUT, Op.WRITE)
IDEMPOTENT = (*COPIES, Op.LOOK_UP, Op.GATHER, Op.NORM)


def _already_there(program: Program, actions: Actions, index: int) -> bool:
    """Whether a move finds its target holding the newest content, from an earlier move."""
    (target,), last = actions[index].writes, None
    place = entry(target, program.buffers, actions[index].micro_batch)
    for action in actions[:index]:
        for ref in (*action.writes, *action.frees):
            if entry(ref, program.buffers, action.micro_batch) == place:
                last = held(ref, action.micro_batch) if ref in action.writes else None
            elif ref in action.writes and action.op in CHANGES and HeldContent(ref.content) == last:
                last = None  # a newer one is elsewhere
    return last == HeldContent(target.content)


@settings(max_examples=examples(60))
@given(cases(free=True), st.sampled_from(PARTS), st.integers(0, 10**6))
def test_no_action_can_be_left_out_or_doubled_unnoticed(case: Case, part: str, seed: int) -> None:
    programs = [_unrolled(program) for program in case.programs]
    rng = random.Random(seed)
    for stage, program in enumerate(programs):
        actions: Actions = getattr(program, part)
        for index in rng.sample(range(len(actions)), min(4, len(actions))):
            action = actions[index]
            harmless = action.op is Op.FREE or (
                action.op in (Op.READ, Op.LOAD) and _already_there(program, actions, index)
            )
            without = actions[:index] + actions[index + 1 :]
            if not harmless:
                _rejected(case, programs, stage, _with(program, part, without))
            harmless = action.op in IDEMPOTENT and not action.frees
            twice = actions[: index + 1] + actions[index:]
            if not harmless:
                _rejected(case, programs, stage, _with(program, part, twice))


@settings(max_examples=examples(60))
@given(cases(free=True), st.sampled_from(("first", "step")), st.integers(0, 10**6))
def test_blocks_are_judged_as_if_written_out(case: Case, part: str, seed: int) -> None:
    """The verifier skips repetitions that leave what they found."""
    units = case.graph.units + 9
    group = case.graph.strategy.accumulation_group
    graph = replace(case.graph, micro_batches=units * group)
    programs = list(lower(graph, case.placement))
    rng = random.Random(seed)
    for stage, program in enumerate(programs):
        top = getattr(program, part)
        blocks = [i for i, item in enumerate(top) if isinstance(item, Repeat)]
        for i in rng.sample(blocks, min(3, len(blocks))):
            body = list(top[i].body)
            del body[rng.randrange(len(body))]
            broken = _with(
                program, part, (*top[:i], replace(top[i], body=tuple(body)), *top[i + 1 :])
            )
            every = [*programs[:stage], broken, *programs[stage + 1 :]]
            assert _accepted(every, graph) == _accepted([_unrolled(p) for p in every], graph)


def _accepted(programs: list[Program], graph: Graph) -> bool:
    try:
        verify(programs, graph, ROOMY, NodeSharing(1))
    except VerificationError:
        return False
    return True


def _rejected(case: Case, programs: list[Program], stage: int, broken: Program) -> None:
    changed = [*programs[:stage], broken, *programs[stage + 1 :]]
    with pytest.raises(VerificationError):
        verify(changed, case.graph, ROOMY, NodeSharing(1))


def test_activations_may_not_overwrite_gradients_that_are_still_needed() -> None:
    graph = toy_graph(blocks=2, units=1)
    programs = lower(graph, _placement(graph))
    assert programs[0].buffers["a1"].within == "g1"
    verify(programs, graph, ROOMY, NodeSharing(1))
    kept = tuple(a for a in expand(programs[0].step) if a.op is not Op.FREE or a.layer != 1)
    with pytest.raises(
        VerificationError,
        match="activations of layer 1, micro-batch 0 overwrite gradients of layer 1",
    ):
        verify([replace(programs[0], step=kept)], graph, ROOMY, NodeSharing(1))


@pytest.mark.parametrize("tier", Tier)
def test_over_capacity_by_one_byte(tier: Tier) -> None:
    programs = lower(
        PIPELINE, placed(PIPELINE, block=_placement(PIPELINE).stages[0].kinds["block"])
    )
    ranks = 1 if tier is Tier.GPU else 4
    used = max(program.bytes_by_tier()[tier] for program in programs) * ranks
    verify(programs, PIPELINE, ROOMY | {tier: used}, NodeSharing(4))
    with pytest.raises(
        VerificationError, match=f"{used} bytes on .*{tier}.* of {used - 1}".replace("gpu", "GPU")
    ):
        verify(programs, PIPELINE, ROOMY | {tier: used - 1}, NodeSharing(4))
    if tier is not Tier.GPU:
        assert used_bytes(programs, tier, NodeSharing(4)) == used
