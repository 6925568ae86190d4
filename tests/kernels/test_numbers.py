"""Numbers that pass the queues of copies, on a GPU and in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from bigplan.kernels.handwritten.small_copy import small_copy
from bigplan.kernels.numbers import from_host, to_gpu, to_host
from tests.kernels.generated import DEVICE, random

CUDA = DEVICE == "cuda"


def test_factors_are_rounded_as_a_tensor_of_them() -> None:
    values = [0.1, 1 / 3, -3e-4, 1e-45, 2.0**24 + 1, float("inf")]
    found = to_gpu(values, torch.device(DEVICE))
    assert found.device.type == DEVICE
    assert found.tolist() == torch.tensor(values).tolist()


@pytest.mark.parametrize("count", [0, 1, 257])
def test_all_numbers_come_and_no_more(count: int) -> None:
    numbers = torch.arange(count, dtype=torch.int32, device=DEVICE) * 3 - 7
    there = torch.full((count + 4,), -1, dtype=torch.int32, pin_memory=CUDA)
    small_copy(numbers, there)
    if CUDA:
        torch.cuda.synchronize()
    assert there.tolist() == [*range(-7, 3 * count - 7, 3), -1, -1, -1, -1]
    if CUDA:
        assert to_host(numbers) == numbers.tolist()


@pytest.mark.gpu
def test_numbers_do_not_wait_for_copies() -> None:
    """Both ways have 4 GiB to copy when numbers are asked for."""
    here, there = random(0, 2**28), [torch.empty(2**28, pin_memory=True) for _ in range(2)]
    tokens = torch.arange(2, 1000).pin_memory()
    both = (here.clone(), there[0]), (there[1], here)
    assert to_host(to_gpu([3.0, 4.0], here.device).int()) == [3, 4]  # kernels are compiled
    from_host(tokens, here.device)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both]  # type: ignore[no-untyped-call]
    for stream, (to, of) in zip(streams, both, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(4):
                to.copy_(of, non_blocking=True)
    assert to_host(from_host(tokens, here.device)) == tokens.tolist()
    assert to_host(to_gpu([1.0, 2.0], here.device).int()) == [1, 2]
    assert not any(stream.query() for stream in streams)
    torch.cuda.synchronize()
