import pytest

from bigplan.graph.operators import Gemm
from bigplan.report.waste import tile_lost, wave_lost


@pytest.mark.parametrize(
    ("m", "n", "lost"),
    [
        (256, 256, 0.0),
        (128, 256, 0.0),
        (256, 128, 0.0),  # the tile turned
        (128, 128, 0.5),  # half a tile
        (129, 256, 1 - 129 / 256),
        (1, 1, 1 - 1 / (128 * 256)),
    ],
)
def test_tiles_reach_beyond_the_matrix(m: int, n: int, lost: float) -> None:
    assert tile_lost(Gemm("x", m, n, 64)) == pytest.approx(lost)


@pytest.mark.parametrize(
    ("tiles", "lost"), [(100, 0.0), (200, 0.0), (101, 1 - 1.01 / 2), (50, 0.5)]
)
def test_the_last_wave_leaves_multiprocessors_idle(tiles: int, lost: float) -> None:
    assert wave_lost(Gemm("x", 256 * tiles, 128, 64), 100) == pytest.approx(lost)
    assert wave_lost(Gemm("x", 256, 128, 64, batch=tiles), 100) == pytest.approx(lost)
