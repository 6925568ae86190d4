"""How long actions hold their lanes: one, and all of a step added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigplan.content import ADAPTERS, Holds
from bigplan.cost import Costs
from bigplan.cost.costs import GpuWaits, KindCost
from bigplan.cost.rates import Rates
from bigplan.graph.graph import Graph
from bigplan.placement import Share
from bigplan.program import Action, Lane, Op, Program, counted, resource

MOVES = {
    Lane.H2D: "h2d",
    Lane.D2H: "d2h",
    Lane.STATE_IN: "state_in",
    Lane.STATE_OUT: "state_out",
    Lane.NVME_READ: "nvme_read",
    Lane.NVME_WRITE: "nvme_write",
    Lane.CHECKPOINT: "nvme_write",  # as if the checkpoint went to the same drives
}

# What the GPU waits for within a forward or backward, or after it: resources beside the lanes.
COLLECTIVES, LAUNCHING = "collectives within layers", "kernel launches"


def _cost(action: Action, graph: Graph, costs: Costs) -> KindCost:
    """Prices of the action's layer, or of a stage's adapters."""
    if action.layer == ADAPTERS:
        return costs.adapters
    return costs.kinds[graph.layers[action.layer]]


def action_seconds(action: Action, graph: Graph, costs: Costs) -> float:
    """Seconds an action holds its lane."""
    rates, kind = costs.rates, _cost(action, graph, costs)
    if action.lane in MOVES:
        rate = float(getattr(rates, MOVES[action.lane]))
        rate = min(rate, rates.state_out) if action.beside_update else rate
        return rates.latency + action.amount / rate
    on_gpu = action.lane in (Lane.COMPUTE, Lane.GPU_UPDATE)
    memory = rates.device_memory if on_gpu else rates.host_memory
    seconds = 0.0
    match action.op:
        case Op.FORWARD:
            seconds = kind.forward
        case Op.BACKWARD:
            seconds = kind.backward + kind.again(action.recompute)
        case Op.UPDATE:
            rate = rates.cpu_update if action.lane is Lane.CPU else rates.gpu_update
            seconds = action.amount / rate + _update_waits(action, kind, rates)
            seconds += kind.orthogonalise if action.lane is not Lane.CPU else 0.0
        case Op.ACCUMULATE:
            seconds = 3 * action.amount / memory  # read both, write the sum
        case Op.LOOK_UP:
            seconds = 2 * action.amount / memory
        case Op.NORM:
            seconds = action.amount / memory
        case Op.TENSOR_REDUCE | Op.REDUCE | Op.SUM_REPLICAS | Op.GATHER:
            seconds = float(getattr(kind, action.op))
        case Op.SEND:
            message = action.reads[0].content.kind
            lent, back = costs.table
            other = {Holds.PARAMETERS: lent, Holds.PARTIAL_GRADIENTS: back}
            seconds = other.get(message, costs.send)
    return seconds


class Prices:
    """Seconds of a graph's actions at its costs; actions that are alike are priced once.

    Layers of a kind have alike actions, so a program of thousands has some tens of prices.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self._graph, self._costs = graph, costs
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, action: Action) -> float:
        """What `action_seconds` says, by all that it reads."""
        op, lane, layer, reads, _, _, amount, _, recompute, share, beside_update = action
        kind = None if layer == ADAPTERS else self._graph.layers[layer]
        message = reads[0].content.kind if op is Op.SEND else None
        key = op, lane, kind, amount, recompute, share, beside_update, message
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = action_seconds(action, self._graph, self._costs)
        return seconds


def _update_waits(action: Action, kind: KindCost, rates: Rates) -> float:
    """Seconds for which the GPU waits until the host has launched a layer's resident update."""
    if action.share is not Share.GPU:
        return 0.0
    return max(0.0, kind.update_launch.seconds(action.amount) - action.amount / rates.gpu_update)


def by_resource(
    action: Action, seconds: float, graph: Graph, costs: Costs, times: int = 1
) -> dict[str, float]:
    """The seconds that an action took, so many times together, by what they keep busy.

    That is its lane, but for what the GPU waits for on the lane of its compute.
    """
    waits = {name: times * each for name, each in _waits(action, graph, costs).items()}
    at_work = seconds - sum(waits.values())
    return {resource(action.lane).value: at_work, **waits}


def _waits(action: Action, graph: Graph, costs: Costs) -> dict[str, float]:
    kind, passes = _cost(action, graph, costs), list[GpuWaits]()
    match action.op:
        case Op.FORWARD:
            passes = [kind.forward_waits]
        case Op.BACKWARD:
            passes = [kind.backward_waits, kind.waits_again(action.recompute)]
        case Op.TENSOR_REDUCE:
            passes = [GpuWaits(collectives=kind.tensor_reduce)]
        case Op.UPDATE:
            passes = [GpuWaits(launching=_update_waits(action, kind, costs.rates))]
    found = {
        COLLECTIVES: sum(waits.collectives for waits in passes),
        LAUNCHING: sum(waits.launching for waits in passes),
    }
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def busy_seconds(programs: Sequence[Program], graph: Graph, costs: Costs) -> dict[str, float]:
    """Seconds by resource in which it works in a step, of the stage where it works most."""
    worst: dict[str, float] = {}
    for program in programs:
        busy: dict[str, float] = defaultdict(float)
        for action, times in counted(program.step):
            if action.op is not Op.FREE:
                seconds = times * action_seconds(action, graph, costs)
                for name, part in by_resource(action, seconds, graph, costs, times).items():
                    busy[name] += part
        worst.update({name: s for name, s in busy.items() if s > worst.get(name, -1.0)})
    return worst


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds of a step's actions, overlapping or not."""

    by_lane: Mapping[str, float]  # of the busiest stage; lanes of one link together
    by_op: Mapping[str, float]  # of all stages
    serial: float  # of the busiest stage, one action after the other


def total_seconds(programs: Sequence[Program], graph: Graph, costs: Costs) -> Totals:
    """What `simulate`'s events add up to, without them."""
    worst: dict[str, float] = {}
    ops: dict[Op, float] = defaultdict(float)
    serial, prices = 0.0, Prices(graph, costs)
    for program in programs:
        lanes: dict[Lane, float] = defaultdict(float)
        for action, times in counted(program.step):
            if action.op is not Op.FREE:
                seconds = times * prices.seconds(action)
                lanes[resource(action.lane)] += seconds
                ops[action.op] += seconds
        worst.update({k.value: v for k, v in lanes.items() if v > worst.get(k, -1.0)})
        serial = max(serial, sum(lanes.values()))
    return Totals(worst, {op.value: seconds for op, seconds in ops.items()}, serial)
