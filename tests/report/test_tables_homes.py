from dataclasses import replace

from bigplan.report.stages import Home, StageShares, stages_of
from bigplan.report.tables import homes_table
from tests.report.shown import shown
from tests.tiny import tiny_plan

KIB = 2**10


def stage(**homes: dict[str, Home]) -> StageShares:
    found = stages_of(tiny_plan())[0]
    return replace(found, homes={**found.homes, **homes})


def row(text: str, tensor: str) -> str:
    return next(line for line in text.splitlines() if f" {tensor} " in line)


def test_layers_and_bytes_by_tier() -> None:
    text = shown(
        homes_table(
            [
                stage(
                    parameters={"gpu": Home(1, KIB, {}), "nvme": Home(3, 3 * KIB, {})},
                    activations={"host": Home(2, 9 * KIB, {"full": 1, "none": 1})},
                )
            ]
        )
    )
    parameters = " ".join(row(text, "parameters").split())
    assert parameters == "0 parameters 1 of 4: 1 KiB - 3 of 4: 3 KiB"
    assert "1 recomputed, 1 kept: 9 KiB" in row(text, "activations")
    assert "all: " in row(text, "gradients")


def test_state_that_is_split_within_layers_is_told_in_shares_of_its_bytes() -> None:
    homes = {"gpu": Home(1, KIB, {}), "host": Home(2.5, 7 * KIB, {}), "nvme": Home(0.5, 0, {})}
    split = replace(
        stage(optimizer=homes), placement={"optimizer": {"gpu": 0.1, "host": 0.7, "nvme": 0.2}}
    )
    text = shown(homes_table([split]))
    assert " ".join(row(text, "optimizer").split()) == "optimizer 10%: 1 KiB 70%: 7 KiB 20%: 0 B"


def test_stages_with_equal_counts_share_rows_and_tell_the_range_of_bytes() -> None:
    stages = [stage(activations={"gpu": Home(2, n * KIB, {"none": 2})}) for n in (4, 2, 1)]
    other = stage(activations={"gpu": Home(2, KIB, {"full": 2})})
    text = shown(homes_table([*stages, other]))
    assert "2 kept: 1 KiB - 4 KiB" in row(text, "activations")
    assert [line.split()[0] for line in text.splitlines() if " parameters " in line] == ["0-2", "3"]


def test_what_is_streamed_is_told_in_bytes_of_host_memory() -> None:
    half, none = (
        stage(
            optimizer={
                "gpu": Home(1, 2 * KIB, {}),
                "host": Home(3, 6 * KIB, {}, streamed, 2 * KIB * streamed),
            }
        )
        for streamed in (1.5, 0.0)
    )
    assert "3 of 4: 6 KiB, 3 KiB streamed" in row(shown(homes_table([half])), "optimizer")
    assert "streamed" not in shown(homes_table([none]))
    assert "6 KiB, 0 B - 3 KiB streamed" in row(shown(homes_table([none, half])), "optimizer")


def test_a_tier_that_nobody_uses_has_no_column() -> None:
    assert "NVMe" not in shown(homes_table(stages_of(tiny_plan())))


def test_parameters_without_bytes_of_their_own_are_the_optimizers() -> None:
    text = shown(homes_table([stage(parameters={"gpu": Home(4, 0, {})})]))
    assert "all: the optimizer's fp32 copies" in row(text, "parameters")
