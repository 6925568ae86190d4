"""What a search chooses from: the strategies in scope, by families, priced on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import Space, StrategyFamily
from bigplan.solve.candidate import Candidate, Pricing, Workload
from bigplan.solve.pins import Pin
from bigplan.units import counted


@dataclass(frozen=True, slots=True)
class Scope:
    """What the search may choose from."""

    fixed: dict[str, int] = field(default_factory=dict)  # strategy fields the user pinned
    pins: tuple[Pin, ...] = ()
    allowed: Callable[[Strategy], bool] = lambda strategy: True
    idling: bool = True  # whether nodes may be left without work
    told: bool = True  # whether what is missing is told where nothing fits: it takes seconds


SPLITS = {"dp", "tp", "pp"}  # whose product, times cp, is the number of GPUs that work
IN_TURN = 16  # nodes up to which every number is tried,
PARTS = 8  # then so many from a power of two to the next: what lies between differs by 6 to 12%


def node_counts(most: int) -> tuple[int, ...]:
    """Numbers of nodes worth a plan, `most` among them, fewest first."""
    counts = set(range(1, min(most, IN_TURN) + 1)) | {most}
    power = IN_TURN
    while power < most:
        counts |= {n for n in range(power, 2 * power, power // PARTS) if n <= most}
        power *= 2
    return tuple(sorted(counts))


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategies of a workload that are in scope."""

    workload: Workload
    scope: Scope
    pricing: Pricing

    @classmethod
    def of(cls, workload: Workload, scope: Scope) -> Choice:
        """All strategies in scope, none priced yet."""
        return cls(workload, scope, Pricing(workload, scope.pins))

    def fewer(self) -> list[Choice]:
        """The strategies that leave some of the nodes idle, or of the only node's GPUs.

        If batch, layers or heads do not divide by all GPUs, or a step has little work, fewer GPUs
        may be faster. A pinned `dp` says how many GPUs work.
        """
        nodes = self.workload.nodes
        if not self.scope.idling:
            return []
        each = nodes.gpus_per_node if nodes.nodes > 1 else 1
        workloads = [self.workload.on(each * n) for n in self._working(nodes.gpus // each, each)]
        return [replace(self, workload=w, pricing=self.pricing.on(w)) for w in workloads]

    def _working(self, most: int, each: int) -> list[int]:
        """How many nodes, or GPUs of the only node, may work while others idle.

        `most`: how many there are; `each`: GPUs of one.
        """
        fixed = self.scope.fixed
        if fixed.keys() >= SPLITS:
            of_replicas = prod(fixed[split] for split in SPLITS)
            number, rest = divmod(of_replicas * fixed.get("cp", 1), each)
            return [number] if 0 < number < most and not rest else []
        if "dp" in fixed:
            return []
        return [n for n in node_counts(most) if n < most and (most <= 2 * n or n & (n - 1) == 0)]

    @property
    def space(self) -> Space:
        """The legal strategies."""
        model, training, nodes = self.workload.model, self.workload.training, self.workload.nodes
        machine = nodes.gpus, nodes.gpus_per_node
        fixed = self.scope.fixed
        return Space(model, training, *machine, fixed, spreads=True, hybrid=True)

    def families(self) -> list[StrategyFamily]:
        """Families with a member in scope."""
        return [family for family in self.space.families() if self.sample(family)]

    def sample(self, family: StrategyFamily) -> Strategy | None:
        """One member of the family in scope."""
        return next(filter(self.scope.allowed, self.space.members(family)), None)

    def members(self, family: StrategyFamily) -> Iterator[Strategy]:
        """All members of the family in scope."""
        sample = self.sample(family)
        if sample is not None:
            every = self.space.members(family, self.pricing.ends(sample))
            yield from filter(self.scope.allowed, every)

    def hybrids(self, strategy: Strategy) -> list[Strategy]:
        """The same with zero groups, those in scope."""
        return list(filter(self.scope.allowed, self.space.hybrids(strategy)))

    def candidates(self) -> list[Candidate]:
        """Every strategy, priced. Raises InputError where there is none."""
        every = [self.pricing.candidate(s) for f in self.families() for s in self.members(f)]
        if not every:
            raise self.empty()
        return every

    def empty(self) -> InputError:
        """The error that says why there is no strategy."""
        training, nodes = self.workload.training, self.workload.nodes
        product, also = "dp x tp x pp", ""
        if self.scope.fixed.get("cp", 1) > 1:
            product = "dp x cp x tp x pp"
            also = "; cp must divide the tokens of a sequence and the heads of a rank"
        fixed = ", ".join(f"{k}={v}" for k, v in self.scope.fixed.items()) or "the engine's limits"
        return InputError(
            f"no way to split {self.workload.model.name} with a global batch of "
            f"{counted(training.global_batch, 'sequence')} over {counted(nodes.gpus, 'GPU')} "
            f"satisfies {fixed}; "
            f"{product} must equal the GPUs (if all are set: of whole nodes, or a node), "
            f"and dp x micro-batch must divide the global batch{also}"
        )
