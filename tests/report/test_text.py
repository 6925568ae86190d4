from bigplan.report.text import (
    LONG_BAR,
    bytes_text,
    legend,
    number_range,
    percent,
    purpose_bar,
    seconds_text,
    table,
)
from bigplan.units import listed
from tests.report.shown import shown


def test_a_purpose_bar_shows_each_purpose_by_its_share() -> None:
    half = LONG_BAR // 2
    assert purpose_bar({"parameters": 50, "workspace": 25}, 100).plain == (
        "P" * half + "w" * (half // 2) + "·" * (half // 2)
    )
    assert purpose_bar({}, 0).plain == "·" * LONG_BAR
    assert purpose_bar({"optimizer": 300}, 100).plain == "O" * LONG_BAR


def test_many_small_purposes_add_up_to_their_sum() -> None:
    share = dict.fromkeys(("parameters", "gradients", "optimizer", "slots", "staging"), 1)
    used = LONG_BAR - purpose_bar(share, 100).plain.count("·")
    assert used == round(LONG_BAR * 5 / 100)


def test_words() -> None:
    assert legend(["staging", "parameters"]) == "P parameters, t staging, · free"
    assert [listed(w) for w in (["a"], ["a", "b"], ["a", "b", "c"])] == [
        "a",
        "a and b",
        "a, b and c",
    ]
    assert [number_range(n) for n in ([3], [3, 4, 5])] == ["3", "3-5"]
    assert [percent(s) for s in (0.001, 0.5, 0.9999)] == ["<1%", "50%", ">99%"]
    # More than all: a training that takes the rated writes of four drives.
    assert [percent(s) for s in (1.0, 1.004, 3.97)] == ["100%", "100%", "397%"]
    assert [bytes_text(n) for n in (1015 * 2**20, 2.428 * 2**40, 0)] == [
        "1020 MiB",
        "2.43 TiB",
        "0 B",
    ]
    assert seconds_text(599) == "599 s"


def test_a_table_that_is_wider_than_the_terminal_is_a_list_with_every_figure() -> None:
    rows = table("Drives of a node", "drive", "writes", "reads", right=("writes", "reads"))
    rows.add_row("the one of the run folder", "[bold]12.25 GB/s[/bold]", "-")
    rows.add_row("another", "3.50 GB/s", "7.25 GB/s")
    wide, narrow = (shown(rows, width=width).splitlines() for width in (60, 20))
    assert " the one of the run folder  12.25 GB/s          - " in wide
    assert [line.rstrip() for line in narrow if line.strip()] == [
        "Drives of a node",
        "drive the one of the",
        "run folder",
        "  writes 12.25 GB/s",
        "drive another",
        "  writes 3.50 GB/s",
        "  reads 7.25 GB/s",
    ]
