import ctypes
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from bigplan.profile import sensors
from bigplan.profile.sensors import LIMITS, Reading, mean, reader, told, watching

CUDA = torch.device("cuda")
READINGS = st.builds(Reading, st.floats(1e8, 3e9), st.floats(50, 1000), st.integers(0, 0x1FF))


@given(st.lists(READINGS, min_size=1, max_size=20))
def test_the_mean_lies_among_its_readings(readings: list[Reading]) -> None:
    found = mean(readings)
    assert found is not None
    for name in ("clock", "power"):
        values = [getattr(reading, name) for reading in readings]
        assert min(values) * (1 - 1e-9) <= getattr(found, name) <= max(values) * (1 + 1e-9)
    seen = 0
    for reading in readings:
        seen |= reading.reasons
    assert found.reasons & ~seen == 0


def test_of_nothing_there_is_no_mean() -> None:
    assert mean([]) is None


def test_a_reason_counts_from_half_of_the_readings_on() -> None:
    readings = [Reading(1e9, 1, 0x4), Reading(1e9, 1, 0x4 | 0x20), Reading(1e9, 1, 1)]
    found = mean([*readings, Reading(1e9, 1, 0)])
    assert found is not None
    assert found.reasons == 0x4


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        (0, ""),
        (0x1, ""),  # idle: nothing holds it down
        (0x4, ", limited by power"),
        (0x60, ", limited by temperature"),
        (0x24, ", limited by power and temperature"),
    ],
)
def test_a_reading_in_words(reasons: int, text: str) -> None:
    assert told(Reading(1.3176e9, 690.4, reasons)) == f"1.32 GHz, 690 W{text}"


def nvml(refused: str = "", renamed: bool = False) -> SimpleNamespace:
    """The library with one GPU, 'GPU-1b2c', at 1,320 MHz, 690 W, limited by power."""

    def answer(name: str, value: int, given: tuple[object, ...]) -> int:
        if name == refused:
            return 3
        given[-1]._obj.value = value  # type: ignore[attr-defined] # what byref() points to
        return 0

    def handle(uuid: bytes, there: object) -> int:
        return answer("handle", 7, (there,)) if uuid == b"GPU-1b2c" else 6

    reasons = sensors.REASONS[1 if renamed else 0]
    return SimpleNamespace(
        nvmlInit_v2=lambda: 9 if refused == "init" else 0,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetClockInfo=lambda *given: answer("clock", 1320, given),
        nvmlDeviceGetPowerUsage=lambda *given: answer("power", 690_000, given),
        **{reasons: lambda *given: answer("reasons", 4, given)},
    )


def installed(monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sensors, "uuid_of", lambda device: "1b2c")


@pytest.mark.parametrize("renamed", [True, False])
def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch, renamed: bool) -> None:
    installed(monkeypatch, nvml(renamed=renamed))
    read = reader(CUDA)
    assert read is not None
    assert read() == Reading(1.32e9, 690.0, 4)


@pytest.mark.parametrize("refused", ["clock", "power"])
def test_what_nvml_refuses_is_not_known(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    installed(monkeypatch, nvml(refused))
    read = reader(CUDA)
    assert read is not None
    assert read() is None


def test_reasons_may_be_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, nvml("reasons"))
    read = reader(CUDA)
    assert read is not None
    assert read() == Reading(1.32e9, 690.0, 0)


@pytest.mark.parametrize("refused", ["init", "handle"])
def test_without_nvml_nothing_is_read(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    installed(monkeypatch, nvml(refused))
    assert reader(CUDA) is None


def test_without_the_library_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with watching(CUDA, 0.001) as watch:
        pass
    assert (watch.mean, str(watch)) == (None, "")
    assert reader(torch.device("cpu")) is None


def test_a_watch_reads_until_its_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, nvml())
    with watching(CUDA, 0.001) as watch:
        while len(watch.readings) < 3:
            time.sleep(0.001)
    count = len(watch.readings)
    time.sleep(0.01)
    assert len(watch.readings) == count
    assert watch.mean == Reading(1.32e9, 690.0, 4)
    assert str(watch) == "1.32 GHz, 690 W, limited by power"


def test_every_limit_has_a_bit_of_its_own() -> None:
    assert all(bit.bit_count() == 1 for bit in LIMITS)
