"""Every way in which DeepSpeed can run a request, priced: there are only hundreds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import inf

from bigplan.cost.costs import Costs
from bigplan.cost.price import price
from bigplan.engines.deepspeed.config import accumulated_in
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.memory import StageHoldings, memory_use
from bigplan.engines.deepspeed.pipeline import PipedStep, piped
from bigplan.engines.deepspeed.price import BEHAVIOUR, PricedStep, priced
from bigplan.engines.deepspeed.refusals import refusal
from bigplan.engines.deepspeed.sizes import PARTS, BufferSizes, sizes_of
from bigplan.engines.shortage import too_large
from bigplan.errors import InputError
from bigplan.graph.build import build_graph, loss_chunks
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import Ends, Space, StrategyFamily
from bigplan.placement import Placement, Tier
from bigplan.plan import MemoryUse
from bigplan.planner import Request
from bigplan.solve.pins import LOSS_CHUNK, Pin, parse_pins
from bigplan.solve.search import Watch
from bigplan.spec.cluster import NodeGroup
from bigplan.units import counted

DeepSpeedStep = PricedStep | PipedStep
OPEN = (
    "dp, pp, first_blocks, last_blocks, micro_batch, zero, parameters=TIER, optimizer=TIER, "
    "optimizer.host=FRACTION, recompute=none|full, loss_chunk"
)


@dataclass(frozen=True)
class TriedWay:
    """One way, with its memory and time; most ways do not fit, and so are never priced."""

    decisions: Decisions
    stages: tuple[StageHoldings, ...]
    costs: Costs
    nodes: NodeGroup

    @property
    def held(self) -> StageHoldings:
        """What a rank of the first stage holds."""
        return self.stages[0]

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Memory of every tier and stage."""
        return memory_use(self.stages, self.costs, self.nodes)

    @cached_property
    def step(self) -> DeepSpeedStep:
        """The priced step."""
        if len(self.stages) > 1:
            return piped(self.stages, self.costs, self.nodes)
        return priced(self.held, self.costs, self.nodes)

    @cached_property
    def short(self) -> dict[Tier, int]:
        """Bytes that are missing, by tier.

        Of stages with the same layers the first holds the most, since activations of the fewest
        micro-batches are held where a pipeline ends. So the others are not asked.
        """
        fullest = [next(alike) for _, alike in groupby(self.stages, lambda held: held.layers)]
        found = dict[Tier, int]()
        for use in memory_use(fullest, self.costs, self.nodes):
            missing = use.used_bytes - use.capacity_bytes
            if missing > found.get(use.tier, 0):
                found[use.tier] = missing
        return found

    @property
    def placement(self) -> Placement:
        """Its decisions as counts of layers, the form that every plan has."""
        held = self.held
        return self.decisions.placement(len(held.graph.layers) - 2, held.resident / held.owned)

    @property
    def preference(self) -> tuple[float, int, int, str]:
        """Sort key: fastest first, then what moves least, then the lowest stage."""
        moved = sum(self.step.moved().values())
        return round(self.step.seconds, 9), moved, self.decisions.stage, repr(self.decisions)


@dataclass(frozen=True, slots=True)
class WantedOfDeepSpeed:
    """The user's own decisions, as far as DeepSpeed can take them."""

    fixed: Mapping[str, int]
    stage: int | None = None
    parameters: Tier | None = None
    state: Tier | None = None
    on_cpu: float | None = None
    recompute: bool | None = None
    loss_chunk: int | None = None

    @classmethod
    def of(cls, request: Request) -> WantedOfDeepSpeed:
        """Read a request's decisions. Raises InputError for a decision that is not open here."""
        fixed, pins = parse_pins(request.settings)
        found = cls({key: value for key, value in fixed.items() if key != "zero"})
        if "zero" in fixed:
            found = replace(found, stage=fixed["zero"])
        for pin in pins:
            found = found._with(pin)
        return found

    def _with(self, pin: Pin) -> WantedOfDeepSpeed:
        alike = pin.kind is None and pin.stage is None
        match pin:
            case Pin(tensor="parameters", choice=choice, amount=None) if alike:
                return replace(self, parameters=Tier(choice))
            case Pin(tensor="optimizer", choice=choice, amount=None) if alike:
                return replace(self, state=Tier(choice))
            case Pin(tensor="optimizer", choice="host", amount=amount) if alike:
                return replace(self, state=Tier.HOST, on_cpu=amount)
            case Pin(tensor="recompute", choice="none" | "full" as choice, amount=None) if alike:
                return replace(self, recompute=choice == "full")
            case Pin(tensor=tensor, amount=amount) if tensor == LOSS_CHUNK and amount:
                return replace(self, loss_chunk=int(amount))
        raise InputError(
            f"--set: DeepSpeed treats all layers alike, so {pin.tensor} cannot be set like this; "
            f"what is open with --engine deepspeed: {OPEN}"
        )

    def allows(self, way: Decisions) -> bool:
        """Whether the way agrees with every decision of the user."""
        pairs = (
            (self.stage, way.stage),
            (self.parameters, way.parameters),
            (self.state, way.state),
            (self.recompute, way.recompute),
        )
        return all(wanted in (None, found) for wanted, found in pairs)


@dataclass(slots=True)
class DeepSpeedSearch:
    """All ways of one request."""

    request: Request
    wanted: WantedOfDeepSpeed = field(init=False)
    counted: int = 0
    stopped: bool = False
    _graphs: dict[tuple[Strategy, int], tuple[Graph, Costs]] = field(default_factory=dict)
    _sizes: dict[tuple[Strategy, Tier, bool], BufferSizes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wanted = WantedOfDeepSpeed.of(self.request)

    def run(self, watch: Watch) -> list[TriedWay]:
        """The ways that fit, fastest first. Raises InputError, InfeasibleError."""
        fitting, misfits = list[TriedWay](), list[TriedWay]()
        best = inf
        for way in self._ways():
            if fitting and not watch(best, best, 0):
                self.stopped = True
                break
            self.counted += 1
            tried = self._fitted(way)
            if tried.short:
                misfits.append(tried)
            else:
                fitting.append(tried)
                best = min(best, tried.step.seconds)
        if fitting:
            return sorted(fitting, key=lambda one: one.preference)
        if misfits:
            raise too_large(self.request.model.name, "DeepSpeed", [one.short for one in misfits])
        raise self._nothing_legal()

    def _strategies(self) -> Iterator[Strategy]:
        request, nodes = self.request, self.request.cluster.group
        fixed = {"tp": 1, "cp": 1, "vpp": 1, "accumulation_group": 1, **self.wanted.fixed}
        space = Space(request.model, request.training, nodes.gpus, nodes.gpus_per_node, fixed)
        for family in space.families():
            ends = self._ends(family) if family.pp > 1 else None
            for strategy in space.members(family, ends):
                if refusal(request.model, request.training, strategy) is None:
                    yield strategy

    def _ends(self, family: StrategyFamily) -> Ends:
        """Seconds of the first and of the last layer, in units of a block's."""
        request, alone = self.request, Strategy(dp=1, micro_batch=family.micro_batch)
        graph, costs = self._graph(alone, loss_chunks(request.model, request.training, alone)[0])
        each = [costs.kinds[graph.layers[i]] for i in (0, 1, -1)]
        first, block, last = (cost.forward + cost.backward for cost in each)
        return first / block, last / block

    def _ways(self) -> Iterator[Decisions]:
        drive = self.request.cluster.group.nvme is not None
        for strategy in self._strategies():
            for stage in (strategy.zero,) if strategy.dp > 1 else range(4):
                ways = _placed(strategy, stage, drive=drive)
                yield from (w for w in ways if self.wanted.allows(w) and self._exact_enough(w))

    def _exact_enough(self, way: Decisions) -> bool:
        """Whether several micro-batches' gradients are summed in the precision asked for."""
        training = self.request.training
        alone = way.strategy.micro_batches(training) == 1
        return alone or accumulated_in(way, training) == training.gradient_precision

    def _fitted(self, way: Decisions) -> TriedWay:
        """The way with as much state on the GPU, and as many tokens of the loss at once, as fit.

        Where none fits, the way with the least of both. The more state the CPU has, the less of
        the GPU and the more of host memory a way takes. So the least share with which the GPU is
        large enough is found by bisection, and no larger one fits if that one does not.
        """
        shares, chunks = self._shares(way), self._chunks(way.strategy)

        def leanest(place: int) -> TriedWay:
            return self.tried(replace(way, on_cpu=shares[place], loss_chunk=chunks[0]))

        least = bisect_left(
            range(len(shares) - 1), True, key=lambda place: Tier.GPU not in leanest(place).short
        )
        found = leanest(least)
        if found.short:
            return found if least == len(shares) - 1 else leanest(len(shares) - 1)
        larger = (replace(found.decisions, loss_chunk=chunk) for chunk in reversed(chunks[1:]))
        return next((one for way in larger if not (one := self.tried(way)).short), found)

    def _shares(self, way: Decisions) -> Sequence[float]:
        """Shares of the state in host memory that the CPU may keep, smallest first."""
        if way.on_cpu == 1.0:
            return (1.0,)
        if self.wanted.on_cpu is not None:
            return (self.wanted.on_cpu,)
        return [i / PARTS for i in range(1, PARTS)]

    def _chunks(self, strategy: Strategy) -> Sequence[int]:
        """Tokens that the loss may take at once, fewest first."""
        if self.wanted.loss_chunk is not None:
            return (self.wanted.loss_chunk,)
        return loss_chunks(self.request.model, self.request.training, strategy)

    def tried(
        self, way: Decisions, sized: Callable[[BufferSizes], BufferSizes] = lambda sizes: sizes
    ) -> TriedWay:
        """A way priced, whether or not it fits; `sized` overrides a plan's buffer sizes."""
        request = self.request
        graph, costs = self._graph(way.strategy, way.loss_chunk)
        nodes = request.cluster.group
        key = way.strategy, way.state, way.on_cpu < 1.0  # the loss's chunk changes no size
        if key not in self._sizes:
            self._sizes[key] = sizes_of(graph, nodes, way.state, partly=way.on_cpu < 1.0)
        sizes = sized(self._sizes[key])
        stages = range(way.strategy.pp)
        every = (StageHoldings(graph, request.training, way, sizes, stage) for stage in stages)
        return TriedWay(way, tuple(every), costs, nodes)

    def _graph(self, strategy: Strategy, chunk: int) -> tuple[Graph, Costs]:
        key = strategy, chunk
        if key not in self._graphs:
            model, training = self.request.model, self.request.training
            nodes = self.request.cluster.group
            many = nodes.gpu.multiprocessors
            graph = build_graph(model, training, strategy, chunk, multiprocessors=many)
            costs = price(graph, training, nodes, BEHAVIOUR)
            self._graphs[key] = graph, costs
        return self._graphs[key]

    def _nothing_legal(self) -> InputError:
        request = self.request
        gpus, cp = request.cluster.gpus, self.wanted.fixed.get("cp", 1)
        alone = Strategy(dp=gpus, cp=cp, zero=int(gpus > 1))
        why = refusal(request.model, request.training, alone)
        settings = ", ".join(f"{key}={value}" for key, value in request.settings.items())
        return InputError(
            why
            or f"no way in which DeepSpeed runs {request.model.name} satisfies "
            f"{settings or 'its limits'}; open are {OPEN}. dp x micro_batch has to divide the "
            f"global batch of {counted(request.training.global_batch, 'sequence')}, and ZeRO 1 and "
            "2 sum several micro-batches' gradients in 16 bits where the CPU updates (allowed by "
            "--gradient-precision bf16)"
        )


def _placed(strategy: Strategy, stage: int, *, drive: bool) -> Iterator[Decisions]:
    """Tiers of state and parameters that a stage allows, with and without recomputed blocks."""
    for recompute in (False, True):
        way = Decisions(strategy, stage, recompute=recompute)
        for state in Tier:
            for parameters in Tier:
                for on_cpu in (1.0, 0.5):
                    found = replace(way, state=state, parameters=parameters, on_cpu=on_cpu)
                    uses = Tier.NVME in (state, parameters)
                    if not any(found.problems()) and (drive or not uses):
                        yield found
