"""Linear expressions, rows and problems as plain data, read by solver and evaluator alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import mul

from bigplan.placement import Tier

EXACT = 1e-6  # layers by which a rule may be missed


@dataclass(slots=True)  # not frozen: a problem makes thousands, and freezing takes a fifth of that
class Linear:
    """A constant plus coefficients by variable name."""

    terms: Mapping[str, float] = field(default_factory=dict)
    constant: float = 0.0

    def __add__(self, other: Linear | float) -> Linear:
        if not isinstance(other, Linear):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for name, factor in other.terms.items():
            terms[name] = terms.get(name, 0.0) + factor
        return Linear(terms, self.constant + other.constant)

    def __radd__(self, other: float) -> Linear:
        return self + other

    def __mul__(self, factor: float) -> Linear:
        terms = self.terms
        if terms:  # in a fifth of all cases there are none
            terms = {n: c * factor for n, c in terms.items()}
        return Linear(terms, self.constant * factor)

    __rmul__ = __mul__

    def __neg__(self) -> Linear:
        return self * -1.0

    def __sub__(self, other: Linear | float) -> Linear:
        return self + (-1.0 * other)

    def without(self, names: Collection[str]) -> Linear:
        """The expression where these variables are zero."""
        return Linear({n: c for n, c in self.terms.items() if n not in names}, self.constant)

    def at(self, values: Mapping[str, float]) -> float:
        """The value where the variables are `values`."""
        terms = self.terms
        each: Iterator[float] = map(mul, terms.values(), map(values.__getitem__, terms))
        return self.constant + sum(each)


def var(name: str) -> Linear:
    """A variable as an expression."""
    return Linear({name: 1.0})


def total(parts: list[Linear]) -> Linear:
    """The sum."""
    terms = dict(parts[0].terms) if parts else {}
    for part in parts[1:]:
        for name, factor in part.terms.items():
            terms[name] = terms.get(name, 0.0) + factor
    return Linear(terms, sum(part.constant for part in parts))


@dataclass(frozen=True, slots=True)
class Variable:
    """A decision between 0 and `upper`."""

    name: str
    upper: float
    integer: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """`expression` is zero (`equal`) or at most zero; the name says what it means."""

    name: str
    expression: Linear
    equal: bool = False

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether decisions keep it, but for rounding."""
        off = self.expression.at(values)
        return off <= EXACT and not (self.equal and off < -EXACT)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes that a stage's ranks put on a tier must not exceed `limit`."""

    stage: str
    tier: Tier
    used: Linear
    limit: float

    @property
    def excluded(self) -> frozenset[str]:
        """Decisions that are zero because the tier has no byte for them."""
        used = self.used
        if used.constant < self.limit or min(used.terms.values(), default=0.0) < 0:
            return frozenset()
        return frozenset(name for name, factor in used.terms.items() if factor)


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The time `name` is at least `expression`, made of decisions and of times stated before."""

    name: str
    expression: Linear


@dataclass(frozen=True, slots=True)
class Problem:
    """Minimise the time `step` plus a surcharge on serial transfer seconds."""

    variables: tuple[Variable, ...]
    rules: tuple[Rule, ...]
    capacities: tuple[Capacity, ...]
    times: tuple[AtLeast, ...]
    serial: Linear
    spare: frozenset[str] = frozenset()  # decisions that do no more than others

    @property
    def excluded(self) -> frozenset[str]:
        """Decisions that are zero in every plan, or need not be more in any."""
        return self.spare.union(*(row.excluded for row in self.capacities))

    def without(self, names: Collection[str]) -> Problem:
        """The problem where these decisions are zero."""
        if not names:
            return self
        return Problem(
            variables=tuple(v for v in self.variables if v.name not in names),
            rules=tuple(replace(r, expression=r.expression.without(names)) for r in self.rules),
            capacities=tuple(replace(r, used=r.used.without(names)) for r in self.capacities),
            times=tuple(replace(r, expression=r.expression.without(names)) for r in self.times),
            serial=self.serial.without(names),
        )

    def step_seconds(self, decisions: Mapping[str, float]) -> float:
        """The least `step` that the time rows allow for given decisions.

        Times appear with positive factors only, so each is the largest of its rows.
        """
        values = dict(decisions)
        for row in self.times:
            values[row.name] = max(values.get(row.name, 0.0), row.expression.at(values))
        return values["step"]
