"""Quantities: parsed once at the edge, SI inside (bytes, bytes/s, seconds, FLOP/s, items/s).

Text must carry a unit; a plain number is taken to be in the SI unit already.
Sizes follow IEC: GB is 1e9 bytes and GiB is 2**30. In bandwidths `b` is a bit and `B` a byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, NewType

from pydantic import BeforeValidator, Field, WithJsonSchema

from bigplan.errors import InputError, quoted

_PATTERN = re.compile(
    r"\s*(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(?P<unit>\D*?)\s*"
)

# In SI units, far beyond any machine. Products of larger values could overflow a float, and an
# infinite limit would limit nothing.
_LARGEST = 10**30

_LONGEST = 100  # characters: the time to match the pattern grows with the cube of their number


@dataclass(frozen=True)
class Quantity:
    """A kind of quantity: its name, its units as multiples of the SI unit, and an example."""

    name: str
    si: str
    example: str
    units: Mapping[str, Fraction]

    def parse(self, value: object) -> Fraction:
        """Exact value in the SI unit. Raises InputError with value, expected units and example."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._error(value, f"is not {self._article()}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(value, "is not a finite number")
        number = self._parse_text(value) if isinstance(value, str) else Fraction(value)
        if number < 0:
            raise self._error(value, "is negative")
        if number > _LARGEST:
            raise self._error(value, "is larger than anything there is")
        return number

    def _parse_text(self, text: str) -> Fraction:
        match = _PATTERN.fullmatch(text) if len(text) <= _LONGEST else None
        if match is None:
            raise self._error(text, f"is not {self._article()}")
        unit = match["unit"].replace("µ", "u").replace("μ", "u")
        if not unit:
            raise self._error(text, "has no unit")
        if unit not in self.units:
            raise self._error(text, f"has the unit {quoted(unit)}, which is no unit of {self.name}")
        return Fraction(match["number"].replace("_", "")) * self.units[unit]

    def _article(self) -> str:
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    def _error(self, value: object, problem: str) -> InputError:
        wanted = f"write {self._article()} in {self.si}, such as '{self.example}'"
        return InputError(f"{quoted(value)} {problem}; {wanted}")


def _scaled(base: str, prefixes: str, step: int, infix: str = "") -> dict[str, Fraction]:
    """`_scaled("B", "kM", 1000)` is {"B": 1, "kB": 1e3, "MB": 1e6}."""
    units = {base: Fraction(1)} if base else {}
    for power, prefix in enumerate(prefixes, start=1):
        units[f"{prefix}{infix}{base}"] = Fraction(step) ** power
    return units


_BYTE_UNITS = (
    _scaled("B", "kMGTP", 1000) | _scaled("B", "KMGTP", 1024, "i") | {"KB": Fraction(1000)}
)
_BIT_UNITS = {name: size / 8 for name, size in _scaled("b", "kMGT", 1000).items()}

BYTES = Quantity("size", "B, kB, MB, GB, TB, KiB, MiB, GiB or TiB", "80 GiB", _BYTE_UNITS)
BANDWIDTH = Quantity(
    "bandwidth",
    "B/s (bytes) or b/s (bits)",
    "25 GB/s",
    {f"{name}/s": size for name, size in (_BYTE_UNITS | _BIT_UNITS).items()}
    | {f"{name}ps": size for name, size in _BIT_UNITS.items() if name != "b"},
)
SECONDS = Quantity(
    "time",
    "ns, us, ms, s, min, h or d",
    "7 us",
    {
        "s": Fraction(1),
        "ms": Fraction(1, 10**3),
        "us": Fraction(1, 10**6),
        "ns": Fraction(1, 10**9),
        "min": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86400),
        "days": Fraction(86400),
    },
)
_FLOP_UNITS = _scaled("FLOP", "kMGTPE", 1000)
FLOPS = Quantity(
    "arithmetic rate",
    "FLOP/s",
    "312 TFLOP/s",
    {f"{name}/s": size for name, size in _FLOP_UNITS.items()}
    | {f"{name}S": size for name, size in _FLOP_UNITS.items()},
)
RATE = Quantity(
    "rate",
    "items per second",
    "4.15 G/s",
    {f"{name}/s": size for name, size in _scaled("", "kMGT", 1000).items()} | {"/s": Fraction(1)},
)
PRICE = Quantity(
    "price", "USD/h", "55.04 USD/h", {"USD/h": Fraction(1), "$/h": Fraction(1)}
)  # per hour, as clouds state them
POWER = Quantity("power", "W, kW or MW", "10.2 kW", _scaled("W", "kM", 1000))
COUNT = Quantity("number", "k, M, B or T", "1 T", _scaled("", "kMBT", 1000))


def parse_bytes(value: object) -> int:
    """Size in bytes, rounded to a whole byte. Raises InputError."""
    return round(BYTES.parse(value))


def parse_bandwidth(value: object) -> float:
    """Bandwidth in bytes/s; "800 Gb/s" is 1e11. Raises InputError."""
    return float(BANDWIDTH.parse(value))


def parse_seconds(value: object) -> float:
    """Time in seconds. Raises InputError."""
    return float(SECONDS.parse(value))


def parse_flops(value: object) -> float:
    """Arithmetic rate in FLOP/s. Raises InputError."""
    return float(FLOPS.parse(value))


def parse_rate(value: object) -> float:
    """Items per second. Raises InputError."""
    return float(RATE.parse(value))


def parse_price(value: object) -> float:
    """US dollars per hour. Raises InputError."""
    return float(PRICE.parse(value))


def parse_power(value: object) -> float:
    """Watts. Raises InputError."""
    return float(POWER.parse(value))


def parse_count(value: object) -> int:
    """A whole number: "1 T" and 1e12 are the same. Raises InputError."""
    number = COUNT.parse(value)
    if number.denominator != 1:
        raise InputError(f"{quoted(value)} is no whole number; write one, such as '1 T'")
    return int(number)


def _format(value: float, units: tuple[tuple[str, float], ...], digits: int = 4) -> str:
    """`value` in the largest unit that keeps it >= 1, with `digits` significant digits."""
    if value == 0:
        return f"0 {units[0][0]}"
    for index, (name, size) in enumerate(units):
        larger = units[index + 1][1] if index + 1 < len(units) else math.inf
        if abs(value) >= larger:
            continue
        shown = _significant(value / size, digits)
        # 1023.99 KiB would round to 1024 KiB: the next unit is better.
        if abs(float(shown)) * size >= larger:
            continue
        return f"{shown} {name}".rstrip()
    raise AssertionError("the last unit always returns")


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _decimal(suffix: str, prefixes: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    return tuple((f"{prefix}{suffix}", 1000.0**power) for power, prefix in enumerate(prefixes))


_SHOWN_BYTES = tuple(
    (name, 1024.0**power) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
)
_SHOWN_BANDWIDTH = _decimal("B/s", ("", "k", "M", "G", "T", "P"))
_SHOWN_FLOPS = _decimal("FLOP/s", ("", "k", "M", "G", "T", "P", "E"))
_SHOWN_COUNT = _decimal("", ("", "k", "M", "B", "T"))
_SHOWN_SECONDS = (
    ("ns", 1e-9),
    ("us", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("min", 60.0),
    ("h", 3600.0),
)


def format_bytes(value: float) -> str:
    """Bytes as text in binary units: 85899345920 -> '80 GiB'."""
    return _format(value, _SHOWN_BYTES)


def format_bandwidth(value: float) -> str:
    """Bytes/s as text in decimal units: 3.35e12 -> '3.35 TB/s'."""
    return _format(value, _SHOWN_BANDWIDTH)


def format_seconds(value: float) -> str:
    """Seconds as text: 7e-6 -> '7 us'; minutes from 60 s on."""
    return "0 s" if value == 0 else _format(value, _SHOWN_SECONDS)


def format_flops(value: float) -> str:
    """FLOP/s as text: 3.12e14 -> '312 TFLOP/s'."""
    return _format(value, _SHOWN_FLOPS)


def format_count(value: float) -> str:
    """A count as text: 8030261248 -> '8.03 B' (k, M, B = 1e9, T = 1e12)."""
    return _format(value, _SHOWN_COUNT)


def rounded(value: float) -> float:
    """To three digits: a short measurement has no more, and a reader wants no more."""
    return float(f"{value:.3g}")


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: '1 sequence', '2 sequences', '1,024 sequences'."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def listed(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def be(number: int) -> str:
    """'is' for 1, 'are' for other numbers."""
    return "is" if number == 1 else "are"


def exact_text(quantity: Quantity, value: float) -> str:
    """Text that parses back to exactly `value`, in the unit that makes it shortest."""
    candidates = []
    for unit, size in quantity.units.items():
        shown = repr(float(Fraction(value) / size)).removesuffix(".0")
        text = f"{shown} {unit}"
        if float(quantity.parse(text)) == value:
            candidates.append(text)
    # A float divided by 1 is exact, so a unit of size 1 always gives a candidate.
    return min(candidates, key=_awkwardness)


def _awkwardness(text: str) -> tuple[bool, bool, bool, int, str]:
    """Sort key: exponents, bits ("b"), "FLOPS", "$" and leading zeros are harder to read."""
    return (
        "e" in text,
        "b" in text or "FLOPS" in text or "$" in text,
        text.startswith("0."),
        len(text),
        text.swapcase(),
    )


QUANTITY = "quantity"
"""key that marks the JSON Schema of a quantity until the field's limits are applied to it"""
_DECIMALS = r"(?:\d{1,12}(?:\.\d{1,12})?|\d{1,3}(?:\.\d{1,12})?[eE][+-]?\d)"


# A number above 0 has a digit other than 0 before its exponent.
_POSITIVE = r"^(?=[0.]*[1-9])"


def positive(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a quantity without 0."""
    numbers, text = schema["anyOf"]
    pattern = _POSITIVE + text["pattern"].removeprefix("^")
    return schema | {"anyOf": [numbers | {"exclusiveMinimum": 0}, text | {"pattern": pattern}]}


def _schema(quantity: Quantity, *, whole: bool = False) -> dict[str, Any]:
    """JSON Schema of a quantity in a file: a number, or text with a unit.

    It allows a little less than the parser: no underscores, at most one space, exponents of one
    digit. Whole quantities may have up to three decimals, only in units of at least 1000.
    """
    every = _either(quantity.units)
    texts = [rf"{_DECIMALS} ?{every}"]
    if whole:
        thousands = _either([unit for unit, size in quantity.units.items() if size >= 1000])
        texts = [rf"\d{{1,12}} ?{every}", rf"\d{{1,9}}\.\d{{1,3}} ?{thousands}"]
    numbers = {"type": "integer" if whole else "number", "minimum": 0, "maximum": _LARGEST}
    text = {"type": "string", "pattern": f"^(?:{'|'.join(texts)})$"}
    return {QUANTITY: True, "anyOf": [numbers, text]}


def _either(units: Iterable[str]) -> str:
    return f"(?:{'|'.join(sorted(map(re.escape, units)))})"


Bytes = Annotated[
    int, BeforeValidator(parse_bytes), WithJsonSchema(_schema(BYTES, whole=True), mode="validation")
]
Bandwidth = Annotated[
    float, BeforeValidator(parse_bandwidth), WithJsonSchema(_schema(BANDWIDTH), mode="validation")
]
PerNode = NewType("PerNode", float)  # rate of all ranks of a node together
PerRank = NewType("PerRank", float)  # rate of one rank: what its node's other ranks leave to it
NodeBandwidth = Annotated[
    PerNode, BeforeValidator(parse_bandwidth), WithJsonSchema(_schema(BANDWIDTH), mode="validation")
]
RankBandwidth = Annotated[
    PerRank, BeforeValidator(parse_bandwidth), WithJsonSchema(_schema(BANDWIDTH), mode="validation")
]
Seconds = Annotated[
    float, BeforeValidator(parse_seconds), WithJsonSchema(_schema(SECONDS), mode="validation")
]
Rate = Annotated[
    float, BeforeValidator(parse_rate), WithJsonSchema(_schema(RATE), mode="validation")
]
NodeRate = Annotated[
    PerNode, BeforeValidator(parse_rate), WithJsonSchema(_schema(RATE), mode="validation")
]
RankRate = Annotated[
    PerRank, BeforeValidator(parse_rate), WithJsonSchema(_schema(RATE), mode="validation")
]
Price = Annotated[
    float, BeforeValidator(parse_price), WithJsonSchema(_schema(PRICE), mode="validation")
]
Power = Annotated[
    float, BeforeValidator(parse_power), WithJsonSchema(_schema(POWER), mode="validation")
]
Count = Annotated[
    int, BeforeValidator(parse_count), WithJsonSchema(_schema(COUNT, whole=True), mode="validation")
]
PositiveFlops = Annotated[
    float,
    BeforeValidator(parse_flops),
    Field(gt=0),
    WithJsonSchema(positive(_schema(FLOPS)), mode="validation"),
]
