import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile.host import ODD, _elements, _thread_counts, adam
from tests.profile.small import bench


@pytest.mark.parametrize(
    ("cores", "quick", "counts"),
    [(1, True, (1,)), (2, True, (1, 2)), (16, True, (8, 12, 16)), (16, False, (1, 4, 8, 12, 16))],
)
def test_numbers_of_threads(cores: int, quick: bool, counts: tuple[int, ...]) -> None:
    assert _thread_counts(bench(cores=cores, quick=quick)) == counts


def test_tensors_in_a_row_never_start_a_power_of_two_apart() -> None:
    elements = _elements(bench(), 4)
    assert (elements + ODD) % 4096 == 0
    assert 4 * elements % 4096 != 0


def test_the_timed_update_is_an_update() -> None:
    tensors = torch.empty(4, 1000)
    adam(tensors)()
    parameters, gradients, first, second = tensors.unbind()
    assert bool((parameters < 1e-3).all())  # against the gradient
    assert float(gradients[0]) == pytest.approx(1e-3 / 1.001)  # divided in the same pass
    assert float(first[0]) == pytest.approx(1e-3, rel=1e-3)
    assert float(second[0]) == pytest.approx(1e-3 * 0.95, rel=1e-3)
