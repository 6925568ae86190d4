"""Every operator and every move of a plan's step, with its time and what it is bound by.

Rows count one GPU of every pipeline stage. So for each kind of action, seconds add up to those of
the plan. No other module of the reports asks the cost model about single operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from bigplan.cost.collective import LayerGroups
from bigplan.cost.compute import Device, alignment, on_tensor_cores
from bigplan.cost.framework import NATIVE
from bigplan.cost.operators import Bound, OperatorCost, operator_costs
from bigplan.cost.price import device_of, pass_cost
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.graph.operators import Attention, Gemm, Operator
from bigplan.plan import Plan
from bigplan.planner import programs_of
from bigplan.program import Lane, Op, Program, counted, resource
from bigplan.simulate import action_seconds
from bigplan.solve.candidate import Candidate
from bigplan.spec.gpu import Gpu
from bigplan.spec.layers import BLOCKS

LAUNCHES = "waiting for launches"  # the time of a pass beyond that of its operators
BESIDE = "beside collectives"  # what operators take longer while those of data parallelism run
PASSES = ("forward", "backward", "recompute")
PER_MICRO_BATCH, PER_STEP = "micro-batch", "step"
MOVES: dict[str, str] = {
    Lane.H2D: "transfer",
    Lane.D2H: "transfer",
    Lane.NVME_READ: "transfer",
    Lane.NVME_WRITE: "transfer",
    Lane.COMM: "communication",
    Lane.SEND: "communication",
    Lane.RECV: "communication",
}


@dataclass(frozen=True)
class OperatorRow:
    """One operator or move that runs `times` times a step. Seconds, FLOPs and bytes are the sums.

    `where` is the layer kind, or the resource of a move. `phase` is forward, backward or recompute.
    For a move, `phase` says whether it happens for every micro-batch, or less often in a step.
    `tensor_cores` is None for operators that cannot use them. `alignment` is the part of a
    product's rate that is left where rows' lengths are no multiples of 8, so that loads are narrow;
    1 where they are. `tile_lost` is the share of the work
    of 128 x 256 tiles that lies outside the matrix. `wave_lost` is the share of the
    multiprocessors' time in which the last wave leaves them idle. `lost` is the share of the priced
    time that both cost with the best tile: nothing at the GPU's power limit, which costs
    `power_lost` of the time. `of_peak` is the rate reached. It is a share of the
    GPU's peak FLOP/s where arithmetic binds, elsewhere of its nominal memory bandwidth.
    """

    where: str
    phase: str
    name: str
    times: int
    seconds: float
    flops: float
    nbytes: float
    bound: str
    tensor_cores: bool | None = None
    alignment: float | None = None
    tile_lost: float | None = None
    wave_lost: float | None = None
    lost: float | None = None
    power_lost: float | None = None
    of_peak: float | None = None

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte; None where nothing is computed."""
        return self.flops / self.nbytes if self.flops and self.nbytes else None

    @property
    def of_layers(self) -> bool:
        """Whether the row is an operator of a layer's forward, backward or recomputation."""
        return self.phase in PASSES

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second reached; None where there are no bytes or no seconds."""
        return self.nbytes / self.seconds if self.nbytes and self.seconds else None


def operator_rows(plan: Plan) -> list[OperatorRow]:
    """Each kind of layer with its forward, backward and recomputation; then updates and moves."""
    candidate, programs = programs_of(plan)
    graph = candidate.graph
    rows = [row for name in graph.kinds for row in _kind_rows(plan, candidate, name)]
    return [*rows, *_action_rows(candidate, programs)]


def _kind_rows(plan: Plan, candidate: Candidate, name: str) -> Iterator[OperatorRow]:
    graph = candidate.graph
    kind, slowed = graph.kinds[name], candidate.costs.kinds[name].slowed
    placed = [stage.kinds[name] for stage in plan.placement.stages if name in stage.kinds]
    layers = sum(p.layers for p in placed)
    forward, backward, recompute = PASSES
    passes: list[tuple[str, tuple[Operator, ...], int]] = [
        (forward, kind.forward, layers),
        (backward, kind.backward, layers),
    ]
    for policy in reversed(Recompute):
        again = sum(sum(p.activations.get(policy, {}).values()) for p in placed)
        passes.append((recompute, kind.again(policy), again))
    for phase, operators, count in passes:
        times = count * graph.micro_batches
        if times and operators:
            yield from _pass_rows(plan, graph, kind, (phase, operators, times))
        longer = times * {forward: slowed.forward, backward: slowed.backward}.get(phase, 0.0)
        if longer:
            bound = str(Bound.COMMUNICATION)
            yield OperatorRow(name, phase, BESIDE, times, longer, 0.0, 0.0, bound)


def _pass_rows(
    plan: Plan, graph: Graph, kind: LayerKind, run: tuple[str, tuple[Operator, ...], int]
) -> Iterator[OperatorRow]:
    phase, operators, times = run
    nodes = plan.cluster.group
    device = device_of(nodes, plan.training, NATIVE)
    groups = LayerGroups.of(graph.strategy, nodes)
    captured = plan.placement.captured and kind.name in BLOCKS
    framework = replace(NATIVE, captured=captured, waits=kind.in_turn)
    again = phase == PASSES[2]
    whole = pass_cost(operators, device, groups, framework, again=again).seconds * times
    costs = list(operator_costs(operators, device, groups, NATIVE))
    for operator, cost in zip(operators, costs, strict=True):
        yield _row(device, operator, cost, (kind.name, phase, times))
    rest = whole - sum(cost.seconds for cost in costs) * times
    if rest > 1e-9 * whole:
        yield OperatorRow(kind.name, phase, LAUNCHES, times, rest, 0.0, 0.0, str(Bound.LATENCY))


def _row(
    device: Device, operator: Operator, cost: OperatorCost, run: tuple[str, str, int]
) -> OperatorRow:
    where, phase, times = run
    gemm = operator if isinstance(operator, Gemm) else None
    return OperatorRow(
        where=where,
        phase=phase,
        name=cost.name,
        times=times,
        seconds=cost.seconds * times,
        flops=cost.flops * times,
        nbytes=cost.nbytes * times,
        bound=str(cost.bound),
        tensor_cores=uses_tensor_cores(operator, device.gpu, device.precision),
        alignment=alignment(gemm, device.gpu, device.precision) if gemm else None,
        tile_lost=tile_lost(gemm) if gemm else None,
        wave_lost=wave_lost(gemm, device.gpu.multiprocessors) if gemm else None,
        lost=_lost(cost) if gemm else None,
        power_lost=cost.power_lost if gemm else None,
        of_peak=_of_peak(cost, device),
    )


def _lost(cost: OperatorCost) -> float:
    """To tiles; where power binds, a higher clock makes up for what they wait."""
    return 0.0 if cost.bound is Bound.POWER else 1 - 1 / cost.tile_waste


def _of_peak(cost: OperatorCost, device: Device) -> float | None:
    if not cost.seconds or cost.bound is Bound.COMMUNICATION:
        return None
    if cost.bound in (Bound.COMPUTE, Bound.POWER):
        return cost.flops / cost.seconds / device.gpu.peak(device.precision)
    return cost.nbytes / cost.seconds / device.gpu.memory_bandwidth


def uses_tensor_cores(operator: Operator, gpu: Gpu, precision: str) -> bool | None:
    """Whether the price has it on tensor cores; fused attention pads its heads to suit them."""
    if not (isinstance(operator, Gemm | Attention) and gpu.runs_kernels):
        return None
    if isinstance(operator, Gemm):
        return on_tensor_cores(operator, gpu, precision)
    return precision != "fp32"


def _action_rows(candidate: Candidate, programs: tuple[Program, ...]) -> Iterator[OperatorRow]:
    """Updates, norms and everything that moves, by action and resource."""
    graph, costs = candidate.graph, candidate.costs
    totals: dict[tuple[Op, str, str], tuple[int, float, float]] = {}
    for program in programs:
        for action, times in counted(program.step):
            if action.op in (Op.FORWARD, Op.BACKWARD, Op.FREE):
                continue
            phase = PER_MICRO_BATCH if action.micro_batch >= 0 else PER_STEP
            key = action.op, resource(action.lane), phase
            count, seconds, nbytes = totals.get(key, (0, 0.0, 0.0))
            totals[key] = (
                count + times,
                seconds + times * action_seconds(action, graph, costs),
                nbytes + times * action.amount * _bytes_each(action.op, graph),
            )
    for (op, where, phase), (times, seconds, nbytes) in totals.items():
        on_gpu = Bound.COMMUNICATION if op is Op.TENSOR_REDUCE else Bound.MEMORY
        by_muon = any(kind.orthogonalised for kind in graph.kinds.values())
        if op is Op.UPDATE and by_muon and where == Lane.COMPUTE:  # products take most of it
            on_gpu = Bound.COMPUTE
        bound = MOVES.get(where, str(on_gpu))
        yield OperatorRow(where, phase, str(op), times, seconds, 0.0, nbytes, bound)


def _bytes_each(op: Op, graph: Graph) -> float:
    """Bytes per unit of an action's amount.

    For each element, an update reads and writes the state, reads the gradient and writes the
    parameter. An accumulation reads two gradients and writes their sum.
    """
    if op is Op.UPDATE:
        return 2 * graph.sizes.stored + graph.sizes.gradient + graph.sizes.parameter
    return {Op.ACCUMULATE: 3, Op.LOOK_UP: 2}.get(op, 1)


LONG, SHORT = 256, 128  # sides of the largest tile of cuBLAS on current GPUs


def tile_lost(gemm: Gemm) -> float:
    """The share of the tiles' area that lies outside the matrix."""
    rows, columns = _tiles(gemm)
    area = rows[0] * rows[1] * columns[0] * columns[1]
    return 1 - _rows(gemm) * gemm.n / area


def _rows(gemm: Gemm) -> int:
    """Rows of a group, on average."""
    return gemm.m if gemm.of_rows else -(-gemm.m // gemm.groups)


def wave_lost(gemm: Gemm, multiprocessors: int) -> float:
    """The share of the multiprocessors' time that the last wave leaves idle."""
    rows, columns = _tiles(gemm)
    alike = gemm.batch if gemm.apart else gemm.batch * gemm.groups
    waves = rows[0] * columns[0] * alike / multiprocessors
    return 1 - waves / ceil(waves)


def _tiles(gemm: Gemm) -> tuple[tuple[int, int], tuple[int, int]]:
    """(number, size) of the tiles along rows and along columns, for the smaller covered area."""
    ways, m = ((SHORT, LONG), (LONG, SHORT)), _rows(gemm)
    covers = [((-(-m // a), a), (-(-gemm.n // b), b)) for a, b in ways]
    return min(covers, key=lambda c: c[0][0] * c[0][1] * c[1][0] * c[1][1])
