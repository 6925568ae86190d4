"""What a search chooses from: the strategies in scope, by families, priced on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bigplan.errors import InputError
from bigplan.graph.strategy import Space, Strategy, StrategyFamily
from bigplan.solve.candidate import Candidate, Pricing, Workload
from bigplan.solve.pins import Pin
from bigplan.units import counted


@dataclass(frozen=True, slots=True)
class Scope:
    """What the search may choose from."""

    fixed: dict[str, int] = field(default_factory=dict)  # strategy fields the user pinned
    pins: tuple[Pin, ...] = ()
    allowed: Callable[[Strategy], bool] = lambda strategy: True


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategies of a workload that are in scope."""

    workload: Workload
    scope: Scope
    pricing: Pricing

    @classmethod
    def of(cls, workload: Workload, scope: Scope) -> Choice:
        """All of them, none priced yet."""
        return cls(workload, scope, Pricing(workload, scope.pins))

    @property
    def space(self) -> Space:
        """The legal strategies."""
        model, training, nodes = self.workload.model, self.workload.training, self.workload.nodes
        return Space(model, training, nodes.gpus, nodes.gpus_per_node, self.scope.fixed)

    def families(self) -> list[StrategyFamily]:
        """Families with a member in scope. Raises InputError where there is none."""
        found = [family for family in self.space.families() if self.sample(family)]
        if not found:
            self._refuse()
        return found

    def sample(self, family: StrategyFamily) -> Strategy | None:
        """One member of the family in scope."""
        return next(filter(self.scope.allowed, self.space.members(family)), None)

    def members(self, family: StrategyFamily) -> Iterator[Strategy]:
        """All members of the family in scope."""
        sample = self.sample(family)
        if sample is not None:
            every = self.space.members(family, self.pricing.ends(sample))
            yield from filter(self.scope.allowed, every)

    def candidates(self) -> list[Candidate]:
        """Every strategy, priced. Raises InputError where there is none."""
        return [self.pricing.candidate(s) for f in self.families() for s in self.members(f)]

    def _refuse(self) -> None:
        training, nodes = self.workload.training, self.workload.nodes
        fixed = ", ".join(f"{k}={v}" for k, v in self.scope.fixed.items()) or "the engine's limits"
        raise InputError(
            f"no way to split {self.workload.model.name} with a global batch of "
            f"{counted(training.global_batch, 'sequence')} over {counted(nodes.gpus, 'GPU')} "
            f"satisfies {fixed}; "
            "dp x tp x pp must equal the GPUs, and dp x micro-batch must divide the global batch"
        )
