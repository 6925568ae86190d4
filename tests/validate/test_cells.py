"""Cells in words that tables use, and those that the rules know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bigplan.validate import cells
from bigplan.validate.rows import read_rows


@pytest.mark.parametrize(
    ("rewrite", "told", "known"),
    [
        (cells.gpu, "NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        (cells.gpu, "8x NVIDIA GeForce RTX 4090", "RTX 4090"),
        (cells.gpu, "AMD Instinct MI300X", "MI300X"),
        (cells.gpu, "XH100", "XH100"),
        (cells.flag, "True", "1"),
        (cells.flag, "no", "0"),
        (cells.flag, "maybe", "maybe"),
        (cells.count, "4,096", "4096"),
        (cells.count, "4,09", "4,09"),
        (cells.stage, "ZeRO-3", "3"),
        (cells.stage, "stage2", "2"),
        (cells.stage, "1", "1"),
        (cells.kind, "no", None),
        (cells.kind, "dense", None),
        (cells.kind, "lora", "lora"),
        (cells.place, "None", "none"),
        (cells.place, "yes", "cpu"),
        (cells.place, "cpu:25%", "cpu:25%"),
        (cells.recompute, "True", "full"),
        (cells.recompute, "Full, every layer", "full"),
        (cells.recompute, "off", "none"),
        (cells.recompute, "sometimes", "sometimes"),
        (cells.precision, "bfloat16", "bf16"),
        (cells.precision, "BF16-mixed", "bf16"),
        (cells.precision, "MXFP8", "fp8"),
        (cells.precision, "nf4+bf16 (QLoRA)", "bf16"),
    ],
)
def test_words_of_tables(
    rewrite: Callable[[str], str | None], told: str, known: str | None
) -> None:
    assert rewrite(told) == known


def test_words_that_are_known_stay() -> None:
    for row in read_rows():
        for name in ("recompute", "offload_optimizer", "offload_param", "offload_activation"):
            value = getattr(row, name)
            rewrite = cells.recompute if name == "recompute" else cells.place
            assert value is None or rewrite(value) == value
        assert cells.gpu(row.gpu) == row.gpu
