"""A layer's update: what streamed chunks bring and take, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from bigplan.graph.graph import Graph, Recompute
from bigplan.lower import lower
from bigplan.lower.refs import state_home
from bigplan.order import order_of
from bigplan.placement import KindPlacement, Share, Tier
from bigplan.program import Action, Lane, Op, Program, Ref, entry, expand
from bigplan.spec.sharing import NodeSharing
from bigplan.verify import verify
from tests.toys import ROOMY, kind_placement, placed, toy_graph

BLOCKS = 3
HOMES = [(w, g) for w in (Tier.GPU, Tier.HOST) for g in (Tier.GPU, Tier.HOST)]
# A layer has 36 elements of 12 bytes of state, or 8 without a master copy, in rows of 4.
CHUNK = 4 * 60  # bytes: 60 pass through the GPU at a time, less than two rows


@dataclass(frozen=True)
class Order:
    """Actions, and for each a bit of every earlier action that ends before it starts."""

    actions: tuple[Action, ...]
    before: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, *parts: str) -> Order:
        """Parts of a program one after the other, as if the first had not ended."""
        actions = tuple(a for part in parts for a in expand(getattr(program, part)))
        before, last = list[int](), dict[Lane, int]()
        for number, (action, waits) in enumerate(order_of(program.buffers, actions)):
            direct = {*waits, *([last[action.lane]] if action.lane in last else [])}
            last[action.lane] = number
            known = 0
            for other in direct:
                known |= before[other] | 1 << other
            before.append(known)
        return cls(actions, tuple(before))

    def numbers(
        self, *ops: Op, layer: int, where: Callable[[Action], bool] = lambda _: True
    ) -> list[int]:
        """Places of the layer's actions of these ops."""
        return [
            number
            for number, action in enumerate(self.actions)
            if action.op in ops and action.layer == layer and where(action)
        ]

    def follows(self, late: int, early: int) -> bool:
        """Whether `late` waits for `early`."""
        return bool(self.before[late] >> early & 1)


def _block(
    parameters: Tier = Tier.HOST, gradients: Tier = Tier.HOST, streamed: float = 0.5
) -> KindPlacement:
    kind = kind_placement(BLOCKS, parameters, gradients, optimizer=Tier.HOST)
    return kind.model_copy(update={"streamed": streamed * BLOCKS})


def _program(graph: Graph, block: KindPlacement) -> Program:
    programs = lower(graph, placed(graph, chunk=CHUNK, block=block))
    verify(programs, graph, ROOMY, NodeSharing(1))
    return programs[0]


def _graph(*, master: bool = True, deferred: bool = True) -> Graph:
    return toy_graph(blocks=BLOCKS, units=1, master=master, deferred=deferred)


def _uses(ref: Ref) -> Callable[[Action], bool]:
    return lambda action: ref in (*action.reads, *action.writes)


def _of(share: Share) -> Callable[[Action], bool]:
    return lambda action: action.share is share


def _names(refs: Sequence[Ref]) -> list[str]:
    return [ref.buffer for ref in refs]


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize(("parameters", "gradients"), HOMES)
def test_a_chunk_brings_what_its_update_needs_and_takes_home_what_it_changed(
    master: bool, parameters: Tier, gradients: Tier
) -> None:
    program = _program(_graph(master=master), _block(parameters, gradients))
    mine = [a for a in expand(program.flush) if a.layer == 1]
    (came, *_), (went, *_) = ([a for a in mine if a.op is op] for op in (Op.STATE_IN, Op.STATE_OUT))
    update = next(a for a in mine if a.lane is Lane.GPU_UPDATE)
    at_home = parameters is Tier.GPU
    # Gradients in any case: a chunk comes when they are there, wherever they are.
    brought = ["g1"] + (["w1"] if not master and not at_home else [])
    assert _names(came.reads) == ["o1.streamed", *brought]
    used = (["w1"] if not master and at_home else []) + (["g1"] if gradients is Tier.GPU else [])
    assert sorted(_names(update.reads)) == sorted(["stream", "clip", *used])
    assert _names(update.writes) == ["stream", *(["w1"] if at_home else [])]
    assert _names(went.writes) == ["o1.streamed", *([] if at_home else ["w1"])]
    assert _names(went.frees) == ["stream"]


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("streamed", [0.5, 1.0])
@pytest.mark.parametrize(("parameters", "gradients"), HOMES)
def test_every_chunk_comes_is_updated_and_goes(
    master: bool, streamed: float, parameters: Tier, gradients: Tier
) -> None:
    """In this order, and an entry's next chunk comes when its last one has gone."""
    program = _program(_graph(master=master), _block(parameters, gradients, streamed))
    order = Order.of(program, "step", "step")
    left: dict[tuple[str, int], int] = {}
    chunks = 0
    for layer in range(1, BLOCKS + 1):
        assert program.buffers[f"o{layer}.streamed"].count > 1
    for number, action in enumerate(order.actions):
        if action.op is not Op.STATE_IN:
            continue
        key = entry(action.writes[0], program.buffers, -1)
        after = (number + 1, number + 2)
        assert [order.actions[n].op for n in after] == [Op.UPDATE, Op.STATE_OUT]
        assert order.follows(after[0], number)
        assert order.follows(after[1], after[0])
        assert key not in left or order.follows(number, left[key])
        left[key] = after[1]
        chunks += 1
    assert chunks == 2 * sum(
        buffer.count for name, buffer in program.buffers.items() if name.endswith(".streamed")
    )
    assert len(left) == program.buffers["stream"].count


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("streamed", [0.5, 1.0])
@pytest.mark.parametrize(("parameters", "gradients"), HOMES)
def test_gradients_are_given_up_once_all_rows_are_updated(
    deferred: bool, streamed: float, parameters: Tier, gradients: Tier
) -> None:
    program = _program(_graph(deferred=deferred), _block(parameters, gradients, streamed))
    order = Order.of(program, "step", "step")
    for layer in range(1, BLOCKS + 1):
        freed = order.numbers(Op.FREE, layer=layer, where=lambda a: a.frees[0].buffer[0] == "g")
        assert len(freed) == 2
        updates = order.numbers(Op.STATE_IN, Op.UPDATE, Op.GRAD_OUT, layer=layer)
        users = [n for n in updates if f"g{layer}" in _names(order.actions[n].reads)]
        for free in freed:
            early = [number for number in users if number < free]
            assert early
            assert all(order.follows(free, number) for number in early)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("streamed", [0.5, 1.0])
@pytest.mark.parametrize(("parameters", "gradients"), HOMES)
def test_a_forward_waits_for_all_rows_of_its_parameters(
    deferred: bool, streamed: float, parameters: Tier, gradients: Tier
) -> None:
    program = _program(_graph(deferred=deferred), _block(parameters, gradients, streamed))
    order = Order.of(program, "step", "step")
    for layer in range(1, BLOCKS + 1):
        forward = order.numbers(Op.FORWARD, layer=layer)[-1]
        updates = order.numbers(Op.UPDATE, Op.STATE_OUT, Op.LOAD, layer=layer)
        changes = [n for n in updates if f"w{layer}" in _names(order.actions[n].writes)]
        early = [number for number in changes if number < forward]
        assert len(early) >= program.buffers[f"o{layer}.streamed"].count
        assert all(order.follows(forward, number) for number in early)


def test_the_cpu_holds_up_no_chunk_of_the_layers_after() -> None:
    """With a master copy, whose parameters nobody brings."""
    program = _program(_graph(), _block())
    order = Order.of(program, "flush")
    for layer in range(1, BLOCKS + 1):
        (by_cpu,) = order.numbers(Op.UPDATE, layer=layer, where=lambda a: a.lane is Lane.CPU)
        for later in range(layer, BLOCKS + 1):
            ops = (Op.STATE_IN, Op.STATE_OUT)
            assert not any(order.follows(n, by_cpu) for n in order.numbers(*ops, layer=later))


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("parameters", [Tier.GPU, Tier.HOST])
def test_rows_of_other_shares_are_updated_at_any_time(
    master: bool, deferred: bool, parameters: Tier
) -> None:
    """Neither the CPU, nor the GPU, nor the chunks wait for another's part of the same update."""
    block = _block(parameters, Tier.GPU)
    if parameters is Tier.GPU:  # the GPU updates no others
        rows = {Tier.GPU: BLOCKS / 4, Tier.HOST: 3 * BLOCKS / 4}
        block = block.model_copy(update={"optimizer": rows})
    program = _program(_graph(master=master, deferred=deferred), block)
    order = Order.of(program, "step")
    for layer in range(1, BLOCKS + 1):
        ops = Op.STATE_IN, Op.UPDATE, Op.STATE_OUT, Op.PARAM_OUT, Op.LOAD
        parts = {
            share: order.numbers(*ops, layer=layer, where=_of(share))
            for share in (Share.GPU, Share.STREAMED, Share.HOST)
        }
        for mine, numbers in parts.items():
            others = [n for share, other in parts.items() if share is not mine for n in other]
            assert numbers or (mine is Share.GPU and parameters is Tier.HOST)
            assert not any(order.follows(n, other) for n in numbers for other in others)


@pytest.mark.parametrize("on_gpu", [0.0, 1.0])
def test_gradients_leave_before_activations_of_the_layer_before(on_gpu: float) -> None:
    """Of layers that visit no slot: behind those their update would come too late."""
    saved = (Recompute.NONE, Tier.HOST)
    block = kind_placement(BLOCKS, activations=saved, optimizer=Tier.HOST)
    rows = {Tier.GPU: on_gpu, Tier.HOST: BLOCKS - on_gpu}
    order = Order.of(_program(_graph(), block.model_copy(update={"optimizer": rows})), "step")
    for layer in range(2, BLOCKS + 1):
        (leaves,) = order.numbers(Op.GRAD_OUT, layer=layer)
        assert not any(order.follows(leaves, n) for n in order.numbers(Op.SAVE, layer=layer - 1))
        (updated,) = order.numbers(Op.UPDATE, layer=layer, where=lambda a: a.lane is Lane.CPU)
        (forward,) = order.numbers(Op.FORWARD, layer=layer - 1)
        assert not order.follows(updated, forward)


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("deferred", [True, False])
def test_a_checkpoint_reads_a_chunk_between_two_of_its_updates(
    master: bool, deferred: bool
) -> None:
    """It may outlast its step: the next step's chunks may come meanwhile, but not go home."""
    program = _program(_graph(master=master, deferred=deferred), _block())
    order = Order.of(program, "checkpoint", "step")
    for layer in range(1, BLOCKS + 1):
        home = program.buffers[f"o{layer}.streamed"]
        arrivals = order.numbers(Op.STATE_IN, layer=layer)
        assert len(arrivals) == 2 * home.count
        for chunk in range(home.count):
            ref = state_home(layer, Share.STREAMED, chunk)
            written, again = order.numbers(Op.STATE_OUT, layer=layer, where=_uses(ref))
            (saved,) = order.numbers(Op.CKPT, layer=layer, where=_uses(ref))
            coming = arrivals[home.count + chunk]
            assert order.follows(saved, written)
            assert order.follows(again, saved)
            assert order.follows(coming, written)
            assert not order.follows(coming, saved)
