"""Every way in which a framework can run a request, priced; the best that fits of each strategy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from bigplan.cost.costs import Costs
from bigplan.cost.price import price
from bigplan.cost.run import PricedRun, graph_of
from bigplan.engines.frameworks.price import PricedWay
from bigplan.engines.frameworks.tool import Tool
from bigplan.engines.frameworks.way import Way
from bigplan.engines.shortage import too_large
from bigplan.errors import InputError
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import Ends, Space, StrategyFamily
from bigplan.placement import Tier
from bigplan.planner import Request
from bigplan.solve.pins import Pin, parse_pins
from bigplan.solve.search import Watch
from bigplan.solve.thresholds import WITHIN

OPEN = (
    "dp, tp, pp, vpp, ep, zero, zero_group, micro_batch, first_blocks, last_blocks, "
    "parameters=gpu|host, optimizer=gpu|host, optimizer.host=FRACTION, recompute=none|full, "
    "recompute.full=N"
)


@dataclass(frozen=True, slots=True)
class WantedOfFramework:
    """The user's own decisions, as far as these tools can take them."""

    fixed: Mapping[str, int]
    parameters: Tier | None = None
    on_cpu: tuple[float, float] = (0.0, 1.0)  # the least and the most
    recompute: Recompute | None = None
    again: int | None = None

    @classmethod
    def of(cls, request: Request) -> WantedOfFramework:
        """Read a request's decisions. Raises InputError for a decision that is not open here."""
        fixed, pins = parse_pins(request.settings)
        found = cls(fixed)
        for pin in pins:
            found = found._with(pin)
        return found

    def _with(self, pin: Pin) -> WantedOfFramework:
        alike = pin.kind in (None, "block") and pin.stage is None
        match pin:
            case Pin(tensor="parameters", choice="gpu" | "host" as tier, amount=None) if alike:
                return replace(self, parameters=Tier(tier))
            case Pin(tensor="optimizer", choice="gpu", amount=None) if alike:
                return replace(self, on_cpu=(0.0, 0.0))
            case Pin(tensor="optimizer", choice="host", amount=amount) if alike:
                share = 1.0 if amount is None else amount
                return replace(self, on_cpu=(share, share))
            case Pin(tensor="recompute", choice="none" | "full" as how, amount=amount) if alike:
                again = None if amount is None else int(amount)
                return replace(self, recompute=Recompute(how), again=again)
        raise InputError(
            f"--set: {pin.tensor} cannot be set like this for a framework, which treats all layers "
            f"alike; what is open: {OPEN}"
        )

    def allows(self, way: Way) -> bool:
        """Whether the way agrees with the user's decisions about tiers."""
        least, most = self.on_cpu
        home = Tier.HOST if way.parameters_on_host else Tier.GPU
        return least <= way.on_cpu <= most and self.parameters in (None, home)

    def counts(self, tried: range) -> range:
        """The allowed numbers of recomputed blocks, besides none."""
        if self.recompute is Recompute.NONE:
            return range(0)
        return tried if self.again is None else range(self.again, self.again + 1)


@dataclass(slots=True)
class FrameworkSearch:
    """All ways of one request."""

    tool: Tool
    request: Request
    wanted: WantedOfFramework = field(init=False)
    counted: int = 0
    stopped: bool = False
    refused: str | None = None  # why the tool refuses the first strategy that it refuses
    _graphs: dict[tuple[int | bool, ...], Graph] = field(default_factory=dict)
    _costs: dict[tuple[int | bool, ...], Costs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wanted = WantedOfFramework.of(self.request)

    def run(self, watch: Watch) -> list[PricedWay]:
        """The ways that fit, fastest first. Raises InputError, InfeasibleError."""
        fitting, misfits, best = list[PricedWay](), list[PricedWay](), inf
        for strategy in self._strategies():
            if fitting and not watch(best, best, 0):
                self.stopped = True
                break
            ways = self._ways(strategy, misfits)
            best = min([best, *(way.seconds for way in ways)])
            # Groups only add to what a GPU keeps, and they shorten nothing but collectives.
            if any(way.least < best * (1 - WITHIN) for way in ways):
                for hybrid in self._hybrids(strategy):
                    ways += self._ways(hybrid, misfits)
            best = min([best, *(way.seconds for way in ways)])
            fitting += ways
        if fitting:
            return _plainest(sorted(fitting, key=lambda one: one.preference))
        if misfits:
            raise too_large(self.request.model.name, self.tool.name, [one.short for one in misfits])
        raise self._nothing_legal()

    def _ways(self, strategy: Strategy, misfits: list[PricedWay]) -> list[PricedWay]:
        """The strategy's ways that fit; others are added to `misfits`."""
        fitting = list[PricedWay]()
        for home in filter(self.wanted.allows, self.tool.homes(strategy)):
            self.counted += 1
            priced = self._fitted(home)
            if priced.short:
                misfits.append(priced)
                continue
            fitting.append(priced)
            if not priced.way.again:
                break  # a way that moves more only makes room, and takes longer
        return fitting

    def _hybrids(self, strategy: Strategy) -> Iterator[Strategy]:
        """The strategy with zero groups that the tool has."""
        request = self.request
        for hybrid in self._space().hybrids(strategy):
            if self.tool.refusal(request.model, request.training, hybrid) is None:
                yield hybrid

    def _space(self) -> Space:
        request, nodes = self.request, self.request.cluster.group
        fixed = {"accumulation_group": 1, "cp": 1, **self.wanted.fixed}
        machine = nodes.gpus, nodes.gpus_per_node
        return Space(request.model, request.training, *machine, fixed, hybrid=True)

    def _strategies(self) -> Iterator[Strategy]:
        request, space = self.request, self._space()
        for family in space.families():
            members = space.members(family, self._ends(family))
            for strategy in (spread for one in members for spread in self._spread(one)):
                why = self.tool.refusal(request.model, request.training, strategy)
                if why is None:
                    yield strategy
                self.refused = self.refused or why

    def _spread(self, strategy: Strategy) -> Iterator[Strategy]:
        """The strategy with its experts on one rank, on two, and so on, or as the user wants."""
        request = self.request
        ways = self.tool.spread(request.model, strategy)
        wanted = self.wanted.fixed.get("ep")
        for ep in ways if wanted is None else [wanted] if wanted in ways else []:
            yield strategy.model_copy(update={"ep": ep})

    def _ends(self, family: StrategyFamily) -> Ends | None:
        """Seconds of the first and of the last layer, in units of a block's."""
        if family.pp == 1:
            return None
        costs = self.priced(Way(Strategy(**family._asdict()))).costs.kinds
        each = costs["block"].forward + costs["block"].backward
        ends = (costs[name].forward + costs[name].backward for name in ("embedding", "head"))
        first, last = (seconds / each for seconds in ends)
        return first, last

    def _fitted(self, home: Way) -> PricedWay:
        """The way with as few recomputed blocks as fit."""
        if self.wanted.recompute is not Recompute.FULL:
            priced = self.priced(home)
            if not priced.short:
                return priced
        counts = self.wanted.counts(self.tool.counts(self.request.model, home.strategy))
        if not counts:
            return self.priced(home)

        def again(count: int) -> PricedWay:
            return self.priced(replace(home, policy=Recompute.FULL, again=count))

        first = bisect_left(counts, True, key=lambda count: not again(count).short)
        return again(counts[min(first, len(counts) - 1)])

    def priced(self, way: Way) -> PricedWay:
        """The way priced, whether or not it fits."""
        request, nodes = self.request, self.request.cluster.group
        run = PricedRun(
            self.tool.padded(request.model, way.strategy),
            self.tool.trained(request.training),
            way.strategy,
            nodes,
            self.tool.behaviour,
            way.execution(request.model),
        )
        graph = self._graph(run)
        return PricedWay(way, run, graph, self._priced(run, graph))

    def _graph(self, run: PricedRun) -> Graph:
        strategy = run.strategy
        tied = strategy.pp > 1
        key = strategy.tp, strategy.micro_batch, tied, strategy.sequence_parallel, strategy.ep
        if key not in self._graphs:
            self._graphs[key] = graph_of(run)
        micro_batches = strategy.micro_batches(run.training)
        return replace(self._graphs[key], strategy=strategy, micro_batches=micro_batches)

    def _priced(self, run: PricedRun, graph: Graph) -> Costs:
        strategy, alike = run.strategy, {"first_blocks": 0, "last_blocks": 0}
        key = tuple(strategy.model_copy(update=alike).model_dump().values())
        if key not in self._costs:
            self._costs[key] = price(graph, run.training, run.nodes, run.framework)
        return self._costs[key]

    def _nothing_legal(self) -> InputError:
        request = self.request
        settings = ", ".join(f"{key}={value}" for key, value in request.settings.items())
        return InputError(
            f"no way in which {self.tool.name} runs {request.model.name} satisfies "
            f"{settings or 'its limits'}; open are {OPEN}. dp x tp x pp must equal the GPUs, dp x "
            f"micro_batch divide the global batch of {request.training.global_batch}"
            + (", ep the experts and dp x tp" if request.model.experts else "")
            + (f"; {self.refused}" if self.refused else "")
        )


def _plainest(found: list[PricedWay]) -> list[PricedWay]:
    """The ways, first one without zero groups if it does no more beside and is about as fast."""
    first = found[0]
    if not first.way.strategy.zero_group:
        return found
    for priced in found:
        if priced.seconds > first.seconds * (1 + WITHIN):
            break
        more = priced.way.on_cpu > first.way.on_cpu or priced.way.again > first.way.again
        if not priced.way.strategy.zero_group and not more:
            return [priced, *(one for one in found if one is not priced)]
    return found
