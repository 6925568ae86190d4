"""A run's page: what it has of a run that ended early, or that another version predicted."""

from dataclasses import replace

from bigplan.page.html import grids_html
from bigplan.page.run_page import as_recorded, run_page
from bigplan.timeline import Timeline
from tests.page.pages import record
from tests.tiny import tiny_plan


def test_the_path_is_marked_where_the_prediction_is_todays() -> None:
    ran = record(tiny_plan())
    assert as_recorded(ran).critical
    slower = [e._replace(start=2 * e.start, end=2 * e.end) for e in ran.predicted.events]
    older = replace(ran, predicted=Timeline(tuple(slower), 2 * ran.predicted.seconds))
    assert not as_recorded(older).critical
    assert as_recorded(older).seconds == 2 * ran.predicted.seconds
    charts = [chart.name for section in run_page(older).sections for chart in section.charts]
    assert "timeline" in charts
    assert "memory-gpu" in charts
    levels = as_recorded(older).levels
    promised = {(use.stage, use.tier): use.used_bytes for use in older.plan.predicted.memory}
    for (stage, tier), nbytes in promised.items():
        assert sum(lv.nbytes for lv in levels if (lv.stage, lv.tier) == (stage, tier)) == nbytes


def test_a_run_without_a_step() -> None:
    ran = replace(record(tiny_plan()), measured=None, metrics=())
    page = run_page(ran)
    charts = [chart.name for section in page.sections for chart in section.charts]
    assert "loss" not in charts
    assert "compared" not in charts
    assert "No step ended" in page.sections[0].lines[1]
    assert grids_html("", *page.sections[2].grids)
