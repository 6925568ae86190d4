"""What is known of a strategy without a solver: the least that a step takes, and its room."""

from __future__ import annotations

from bigplan.cost import Costs
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import Rings, Tier
from bigplan.solve.alike import ROOMY
from bigplan.solve.ends import leading_seconds, trailing_seconds
from bigplan.solve.interleaved import opening_seconds
from bigplan.solve.memory import (
    adapter_bytes,
    gradient_bytes,
    hidden_bytes,
    muon_bytes,
    owned,
    weight_bytes,
    whole,
)
from bigplan.solve.stage import StageClass, stage_classes
from bigplan.solve.stage_times import StageTimes


def family_bound(graph: Graph, costs: Costs, micro_batches: int, stages: int) -> float:
    """Seconds of compute on layers like the graph's in so many stages, however they are cut.

    The slowest stage takes no less than the mean one, and has a whole number of layers.
    """
    each = {name: cost.forward + cost.backward for name, cost in costs.kinds.items()}
    between = graph.layers[1:-1]
    most = -(-len(between) // stages) * min(each[name] for name in set(between))
    mean = sum(each[name] for name in graph.layers) / stages
    return micro_batches * max(most, mean)


def cheap_bound(graph: Graph, costs: Costs) -> float:
    """Seconds that every plan of the strategy takes at least, nothing recomputed or moved."""
    classes = _classes(graph, costs)
    ends = [_ends(times) for times, _ in classes]
    bound = max(sent_seconds(graph, costs), _round_trips(graph, classes, ends[0]))
    for (times, hops), own in zip(classes, ends, strict=True):
        before = max(ends[0] + hops, own)  # every stage waits for what the first one does
        bound = max(bound, before + graph.units * _compute(times))
        if graph.strategy.shards > 1:
            reduces = sum(count * times.final_reduce(kind) for kind, count in times.stage.kinds)
            bound = max(bound, reduces)
    return bound


def round_trips(graph: Graph, costs: Costs) -> float:
    """Seconds in which units go through a pipeline and back, as many at a time as are in flight.

    A unit's forward begins once the backward of the unit that many before has left the first stage.
    On slow networks most of a trip is messages: 8 B in two stages on 10 Gb/s takes 46 s, of which
    other bounds know 32.
    """
    classes = _classes(graph, costs)
    return _round_trips(graph, classes, _ends(classes[0][0]))


def _round_trips(graph: Graph, classes: list[tuple[StageTimes, float]], ends: float) -> float:
    last, hops = classes[-1]
    if graph.strategy.pp == 1 or last.stage.interleaved:
        return 0.0
    trip = hops + _compute(last)
    return ends + -(-graph.units // graph.in_flight_units(0)) * trip


def sent_seconds(graph: Graph, costs: Costs) -> float:
    """Seconds in which the busiest stage sends, as its messages both ways take turns.

    A chunk sends each micro-batch's hidden state on, but for the last one, and its gradient back,
    but for the first one.
    """
    strategy = graph.strategy
    messages = 2 * strategy.vpp - (strategy.pp == 2)
    return graph.micro_batches * messages * costs.send if strategy.pp > 1 else 0.0


def saved_by_groups(graph: Graph, costs: Costs, hybrid: Costs) -> float:
    """Seconds by which zero groups shorten a step at most, with their prices beside those without.

    Zero groups only add to what is stored, so each of their plans is one without them, too, whose
    collectives take longer. No path through a step is longer by more than all of these together.
    """
    zero, units, saved = graph.strategy.zero, graph.units, 0.0
    gathers = 2 * units if zero == 3 else 1
    reductions = units if zero > 1 else 1
    for name in graph.layers:
        with_all, of_group = costs.kinds[name], hybrid.kinds[name]
        saved += gathers * max(0.0, with_all.gather - of_group.gather)
        saved += reductions * max(0.0, with_all.reduce - of_group.reduce)
        slowed = sum(with_all.slowed) - sum(of_group.slowed)
        saved += graph.micro_batches * max(0.0, slowed)
    return saved


def lacks_room(graph: Graph, costs: Costs, least: Rings = ROOMY) -> bool:
    """Whether nothing fits, wherever tensors are and whatever is recomputed.

    Otherwise something may still not fit. `least`: the shortest rings that plans may have.
    """
    elsewhere = (costs.capacity[Tier.HOST] + costs.capacity[Tier.NVME]) / costs.sharing.ranks
    for stage in stage_classes(graph, ROOMY, least):
        missing = _everything(stage) - costs.capacity[Tier.GPU]
        keeping = [kind for kind, _ in stage.kinds if kind.stores_activations]
        kept = 0.0 if stage.interleaved else sum(_kept(stage, kind) for kind in keeping)
        again = sum(_rerun(stage, kind) for kind in keeping)
        movable = sum(count * _movable(stage, kind) for kind, count in stage.kinds)
        if missing > min(movable + max(kept, again), elsewhere + again):
            return True
    return False


def _classes(graph: Graph, costs: Costs) -> list[tuple[StageTimes, float]]:
    """Every class, and the seconds of a unit until its last stage and back, without its compute."""
    hops = 0.0
    found = list[tuple[StageTimes, float]]()
    for stage in stage_classes(graph):
        times = StageTimes(stage, costs)
        hop, held = _hop(times) + 2 * costs.send, _held(times)
        hops += (len(stage.stages) - 1) * (held + hop) + held
        found.append((times, hops))
        hops += hop
    return found


def _held(times: StageTimes) -> float:
    """Seconds in which a stage waits for messages of a unit after its first, and its own wait.

    A stage of several layers goes on to its second one when it has run the first one on all
    micro-batches, and sends gradients when it has run all but the first one on all of them.
    """
    stage, costs = times.stage, times.costs
    if 0 in stage.stages or stage.interleaved or sum(count for _, count in stage.kinds) == 1:
        return 0.0
    first = costs.kinds[stage.end_kinds[0]]
    backward = first.backward + max(map(first.again, stage.graph.recomputes))
    held = max(0.0, costs.send - first.forward) + max(0.0, costs.send - backward)
    return (times.group - 1) * held


def _ends(times: StageTimes) -> float:
    """Seconds of collectives before a stage's first work and after its last."""
    return leading_seconds(times) + trailing_seconds(times)


def _hop(times: StageTimes) -> float:
    """Seconds from a unit's first micro-batch into a stage to it leaving, forward and backward."""
    if times.stage.interleaved:
        return sum(opening_seconds(times))
    backward, others = times.plain_backward, times.other_micro_batches(times.stage.end_kinds[-1])
    return times.forward_hop() + max(backward - others, backward / times.group)


def _compute(times: StageTimes) -> float:
    return times.forward_compute + times.plain_backward


def _everything(stage: StageClass) -> float:
    """Bytes with all tensors on the GPU, as little recomputed as may be."""
    kinds = list(stage.kinds)
    kept = sum(_kept(stage, kind) for kind, _ in kinds)
    workspace = max(kind.workspace(Recompute.NONE) for kind, _ in kinds)
    tensors = sum(_bytes(stage, k, n) for k, n in kinds) + adapter_bytes(stage)
    workspace += muon_bytes(stage)
    return tensors + kept + workspace + hidden_bytes(stage) + stage.graph.document_bytes


def _kept(stage: StageClass, kind: LayerKind) -> float:
    """Bytes of a kind's activations, as little recomputed as may be."""
    least = stage.graph.recomputes[0] if kind.stores_activations else Recompute.NONE
    return float(sum(stage.entries(kind)) * kind.room(least))


def _bytes(stage: StageClass, kind: LayerKind, count: int) -> float:
    """Bytes of a kind's parameters, gradients and optimizer state, and of their rings."""
    sizes, shares = stage.graph.sizes, stage.shares(kind)
    nbytes = count * weight_bytes(stage, kind)
    slots = min(stage.least.slots, count) if stage.sharded(kind, 3) > 1 and not shares else 0
    if kind.frozen:
        return nbytes + whole(stage, kind) * slots * sizes.parameter
    state = stage.graph.state_bytes(kind, owned(stage, kind))
    nbytes += count * (gradient_bytes(stage, kind) + state)
    sums = min(stage.least.sums, count) if stage.sharded(kind, 2) > 1 and not shares else 0
    return nbytes + whole(stage, kind) * (slots * sizes.parameter + sums * sizes.gradient)


def _movable(stage: StageClass, kind: LayerKind) -> int:
    """Bytes of a layer's parameters, gradients and optimizer state that may leave the GPU."""
    nbytes = 0 if stage.resident(kind, "parameters") else weight_bytes(stage, kind)
    if kind.frozen:
        return nbytes
    nbytes += 0 if stage.resident(kind, "gradients") else gradient_bytes(stage, kind)
    return nbytes + stage.graph.state_bytes(kind, owned(stage, kind))


def _rerun(stage: StageClass, kind: LayerKind) -> float:
    """Bytes of a kind's activations that recomputation saves at most."""
    least = min(map(kind.room, stage.graph.recomputes))
    return _kept(stage, kind) - float(sum(stage.entries(kind)) * least)
