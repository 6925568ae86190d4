import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile import bench as bench_module
from bigplan.profile import host
from bigplan.profile.host import (
    ADAM_BYTES,
    COPY_BYTES,
    ODD,
    _elements,
    _thread_counts,
    adam,
    device_adam,
    measure_cpu_update,
)
from bigplan.runtime.memory.slab import Slab
from bigplan.spec.catalog import find_cluster
from tests.profile.small import bench


@pytest.mark.parametrize(
    ("cores", "quick", "counts"),
    [(1, True, (1,)), (2, True, (1, 2)), (16, True, (8, 12, 16)), (16, False, (1, 4, 8, 12, 16))],
)
def test_numbers_of_threads(cores: int, quick: bool, counts: tuple[int, ...]) -> None:
    assert _thread_counts(bench(cores=cores, quick=quick)) == counts


def test_tensors_in_a_row_never_start_a_power_of_two_apart() -> None:
    elements = _elements(bench(), 16)
    assert (elements + ODD) % 4096 == 0
    assert 4 * elements % 4096 != 0


def test_tensors_and_what_is_copied_beside_them_fit_in_what_a_probe_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a machine with little memory: copies take 8 bytes an element each way at both ends."""
    room = 2**29
    monkeypatch.setattr(bench_module, "available_host_memory", lambda: 8 * room)
    taken: list[int] = []

    def slab(nbytes: int, *, pinned: bool) -> Slab:
        taken.append(nbytes)
        return Slab(4096, pinned=pinned)

    monkeypatch.setattr(host, "Slab", slab)
    with pytest.raises(AssertionError, match="pass the declared"):
        measure_cpu_update(find_cluster("h200-1x").group, bench(), 1.0)
    (tensors,) = taken
    assert tensors % ADAM_BYTES == 0
    elements = tensors // ADAM_BYTES
    assert 0.99 * room < tensors + COPY_BYTES * elements <= room


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_timed_update_is_that_of_mixed_precision(where: str) -> None:
    buffer = torch.empty(ADAM_BYTES * 1000, dtype=torch.uint8, device=where)
    step = adam(buffer) if where == "cpu" else device_adam(buffer)
    step()
    buffer = buffer.cpu()
    parameters, _, first, second = buffer[: 16 * 1000].view(torch.float32).view(4, 1000)
    assert bool((parameters < 1e-3).all())  # against the gradient
    assert float(first[0]) == pytest.approx(0.9e-3 + 0.1e-3 / 1.001, rel=1e-5)  # divided
    assert float(second[0]) == pytest.approx(1e-3 * 0.95, rel=1e-3)
    copy = buffer[16 * 1000 :].view(torch.bfloat16)
    assert torch.equal(copy, parameters.bfloat16())
