import contextlib
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from bigplan import units
from bigplan.errors import InputError
from bigplan.units import Bytes, Quantity


def test_a_number_has_its_noun() -> None:
    told = [units.counted(n, "sequence") for n in (0, 1, 2048)]
    assert told == ["0 sequences", "1 sequence", "2,048 sequences"]
    assert [units.counted(n, "strategy", "strategies") for n in (1, 2)] == [
        "1 strategy",
        "2 strategies",
    ]
    assert [units.be(n) for n in (0, 1, 2)] == ["are", "is", "are"]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80 GiB", 80 * 2**30),
        (units.parse_bytes, "64GB", 64 * 10**9),
        (units.parse_bytes, " 1.5 KiB ", 1536),
        (units.parse_bytes, "1_000 B", 1000),
        (units.parse_bytes, "1e-3 kB", 1),
        (units.parse_bytes, "0.1 GB", 10**8),
        (units.parse_bytes, 4096, 4096),
        (units.parse_bandwidth, "3.35 TB/s", 3.35e12),
        (units.parse_bandwidth, "800 Gb/s", 1e11),
        (units.parse_bandwidth, "800 Gbps", 1e11),
        (units.parse_bandwidth, "2 GiB/s", 2.0 * 2**30),
        (units.parse_bandwidth, 1.5e9, 1.5e9),
        (units.parse_seconds, "7 us", 7e-6),
        (units.parse_seconds, "7 µs", 7e-6),
        (units.parse_seconds, "1.5 min", 90.0),
        (units.parse_flops, "312 TFLOP/s", 3.12e14),
        (units.parse_flops, "312 TFLOPS", 3.12e14),
        (units.parse_rate, "4.15 G/s", 4.15e9),
        (units.parse_rate, "12 /s", 12.0),
        (units.parse_seconds, "30 d", 30 * 86400.0),
        (units.parse_seconds, "1 days", 86400.0),
        (units.parse_price, "55.04 USD/h", 55.04),
        (units.parse_price, "3 $/h", 3.0),
        (units.parse_power, "10.2 kW", 10200.0),
        (units.parse_count, "1 T", 10**12),
        (units.parse_count, "1.5T", 15 * 10**11),
        (units.parse_count, 1e12, 10**12),
        (units.parse_count, 65536, 65536),
    ],
)
def test_parse(parse: Callable[[object], float], text: object, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "bad", "problem"),
    [
        (units.parse_bytes, "80", "'80' has no unit; write a size in B, kB"),
        (units.parse_bytes, "80 Gb", "has the unit 'Gb', which is no unit of size"),
        (units.parse_bytes, "lots", "'lots' is not a size"),
        (units.parse_bytes, "", "'' is not a size"),
        (units.parse_bytes, "-1 GiB", "is negative"),
        (units.parse_bytes, -1, "-1 is negative"),
        (units.parse_bytes, True, "True is not a size"),
        (units.parse_bytes, None, "None is not a size"),
        (units.parse_bytes, float("inf"), "inf is not a finite number"),
        (units.parse_bytes, "1e9999 B", "is not a size"),
        (units.parse_bytes, "1e400GiB", "'1e400GiB' is larger than anything there is"),
        (units.parse_bytes, 10**400, "is larger than anything there is"),
        (units.parse_bandwidth, "1e400 GB/s", "is larger than anything there is"),
        (units.parse_seconds, 1e300, "1e+300 is larger than anything there is"),
        (units.parse_bandwidth, "25 GB", "such as '25 GB/s'"),
        (units.parse_seconds, "7 m", "such as '7 us'"),
        (units.parse_flops, "312 TB/s", "write an arithmetic rate in FLOP/s"),
        (units.parse_rate, "4 GB/s", "such as '4.15 G/s'"),
        (units.parse_price, "55 EUR/h", "such as '55.04 USD/h'"),
        (units.parse_power, "10 kWh", "has the unit 'kWh', which is no unit of power"),
        (units.parse_count, "1 Ti", "write a number in k, M, B or T, such as '1 T'"),
        (units.parse_count, 1.5, "1.5 is no whole number; write one, such as '1 T'"),
    ],
)
def test_wrong_input_names_value_unit_and_example(
    parse: Callable[[object], float], bad: object, problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        parse(bad)
    assert problem in str(caught.value)
    assert "such as '" in str(caught.value)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(80 * 2**30), "80 GiB"),
        (units.format_bytes(2**20 - 1), "1 MiB"),
        (units.format_bytes(1536), "1.5 KiB"),
        (units.format_bandwidth(3.35e12), "3.35 TB/s"),
        (units.format_seconds(7e-6), "7 us"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(0.9999999), "1 s"),
        (units.format_seconds(90), "1.5 min"),
        (units.format_count(8030261248), "8.03 B"),
        (units.format_count(512), "512"),
        (units.format_flops(3.12e14), "312 TFLOP/s"),
    ],
)
def test_format(shown: str, text: str) -> None:
    assert shown == text


@given(st.integers(0, 2**60))
def test_formatted_bytes_parse_back_to_four_digits(value: int) -> None:
    back = units.parse_bytes(units.format_bytes(value))
    # Half a unit of the fourth digit, and half a byte because sizes are whole.
    assert abs(back - value) <= 5.1e-4 * value + 0.5


@given(st.floats(1e-9, 1e6))
def test_formatted_seconds_parse_back_to_four_digits(value: float) -> None:
    assert units.parse_seconds(units.format_seconds(value)) == pytest.approx(value, rel=5.1e-4)


@given(
    st.sampled_from(
        [units.BANDWIDTH, units.SECONDS, units.FLOPS, units.RATE, units.PRICE, units.POWER]
    ),
    st.floats(0, 1e18, allow_subnormal=False),
)
def test_exact_text_loses_nothing(quantity: Quantity, value: float) -> None:
    assert float(quantity.parse(units.exact_text(quantity, value))) == value


@given(st.integers(0, 2**53))
def test_exact_bytes_lose_nothing(value: int) -> None:
    assert units.parse_bytes(units.exact_text(units.BYTES, value)) == value


@given(st.text(max_size=12))
def test_any_text_is_a_value_or_an_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert units.parse_bytes(text) >= 0


class _Box(BaseModel):
    size: Bytes


def test_annotated_type_parses_and_reports() -> None:
    assert _Box.model_validate({"size": "2 KiB"}).size == 2048
    with pytest.raises(ValidationError, match="write a size in"):
        _Box.model_validate({"size": "2 s"})
    texts = _Box.model_json_schema()["properties"]["size"]["anyOf"][1]
    assert re.search(texts["pattern"], "2 KiB")
    assert not re.search(texts["pattern"], "2 s")


def test_the_longest_time_has_words_too() -> None:
    assert units.format_seconds(1e300).endswith(" h")
