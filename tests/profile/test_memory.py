import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile.memory import Use, busy, parse_uses

MiB = 2**20


def test_nvidia_smis_lines() -> None:
    uses = parse_uses("GPU-1b2c, 523, 12\nGPU-3d, [N/A], 0\n\nno such line\n")
    assert uses == {"1b2c": Use(523 * MiB, 12), "3d": Use(None, 0)}


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (Use(), None),
        (Use(4 * MiB, 0), None),
        (Use(2048 * MiB, 0), "2 GiB of its memory are taken)"),
        (Use(0, 60), "(kernels run 60% of the time)"),
        (Use(2048 * MiB, 60), "taken and kernels run"),
    ],
)
def test_others_at_work(use: Use, told: str | None) -> None:
    said = busy(torch.device("cuda", 1), use, 80 * 1024 * MiB)
    if told is None:
        assert said is None
    else:
        assert said is not None
        assert told in said
        assert said.startswith("cuda:1 is in use (")
