from io import StringIO

import pytest
from rich.console import Console

from bigplan.report.profile_report import figures, profile_report, progress_line
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import NodeGroup
from tests.report.shown import shown
from tests.wording import tells


def groups() -> tuple[NodeGroup, NodeGroup]:
    before = find_cluster("h200-1x").group
    gpu = before.gpu.replaced(
        {
            "gemm_efficiency": 0.711,
            "attention_forward_efficiency": before.gpu.attention_forward_efficiency
            | {"sdpa": 0.63},
        },
        {"gemm_efficiency": "measured", "attention_forward_efficiency": "sdpa: measured"},
    )
    pcie = before.pcie.replaced(
        {"both_ways": 98e9, "device_to_host": 22e9},
        {"both_ways": "measured", "device_to_host": "measured"},
    )
    return before, before.model_copy(update={"gpu": gpu, "pcie": pcie})


def test_only_what_was_measured_is_a_figure() -> None:
    found = {figure.name: figure for figure in figures(*groups())}
    assert list(found) == [
        "gemm_efficiency",
        "attention_forward_efficiency.sdpa",
        "device_to_host",
        "both_ways",
    ]
    assert (found["both_ways"].measured, found["both_ways"].before) == ("98 GB/s", "")
    assert found["both_ways"].ratio is None
    assert found["device_to_host"].ratio == 0.4
    before, _ = groups()
    assert list(figures(before, before)) == []


def test_the_table_says_what_was_known_and_from_where() -> None:
    lines = shown(profile_report(*groups())).splitlines()
    rows = {line.split()[1]: line for line in lines if line.startswith((" gpu ", " pcie "))}
    assert rows["gemm_efficiency"].split()[2:] == ["0.711", "0.77", "-8%"]
    assert rows["device_to_host"].split()[2:] == ["22", "GB/s", "55", "GB/s", "x", "0.4"]
    assert rows["both_ways"].split()[2:] == ["98", "GB/s", "-"]
    text = " ".join(" ".join(lines).split())
    assert (
        "gpu.gemm_efficiency before: measured 2026-11-21 by bigplan profile on three H200s" in text
    )
    assert "both_ways before" not in text


@pytest.mark.parametrize("width", [80, 200])
def test_no_figure_is_cut_off_however_narrow_the_terminal(width: int) -> None:
    before, after = groups()
    with StringIO() as file:
        Console(file=file, width=width).print(profile_report(before, after))
        text = file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for figure in figures(before, after):
        row = next(line for line in text.splitlines() if f" {figure.name} " in line)
        assert figure.measured in row
        assert (figure.before or "-") in row
    assert "…" not in text


def test_below_the_table_stands_how_products_were_measured() -> None:
    before, after = groups()
    how = "measured under sustained load at 1.32 GHz, 690 W"
    gpu = after.gpu.replaced({}, {"gemm_efficiency": how})
    text = shown(profile_report(before, after.model_copy(update={"gpu": gpu})))
    assert text.splitlines()[-1].strip() == f"gemm_efficiency: {how}"
    assert "gemm_efficiency:" not in shown(profile_report(before, before))


def test_drives_that_were_not_known_before() -> None:
    before, after = groups()
    found = list(figures(before.model_copy(update={"nvme": None}), after))
    assert [figure.measured for figure in found if figure.name == "read"] == ["2.1 GB/s"]
    assert all(not figure.before for figure in found if figure.block == "nvme")


def test_a_line_of_progress() -> None:
    line = progress_line(*groups())
    assert tells(line, "gemm_efficiency 0.711", "attention_forward_efficiency.sdpa 0.63")
    assert tells(line, "device_to_host 22 GB/s", "both_ways 98 GB/s")
    assert "\n" not in line
