"""What a report is asked for of is told by what is there."""

from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.experiment.running import plan_all
from bigplan.page.subject import Cluster, Experiment, PlanFile, StudyOutcome, find_subject
from bigplan.plan import save_plan
from tests.experiment.studies import BASE, study, unseen
from tests.tiny import tiny_plan, write_cluster


def test_every_kind_is_found(tmp_path: Path) -> None:
    save_plan(tiny_plan(), tmp_path / "plan.yaml")
    cluster = write_cluster(tmp_path)
    one = tmp_path / "one.yaml"
    one.write_text(BASE)
    plan_all(study(tmp_path), tmp_path / "out", 1, unseen)
    assert find_subject(str(tmp_path / "plan.yaml")) == PlanFile(
        tmp_path / "plan.yaml", tiny_plan()
    )
    assert isinstance(find_subject(str(cluster)), Cluster)
    assert isinstance(find_subject("dgx-h100"), Cluster)
    assert isinstance(find_subject(str(one)), Experiment)
    found = find_subject(str(tmp_path / "out"))
    assert isinstance(found, StudyOutcome)
    assert len(found.rows) == 3


def test_what_it_is_none_of_is_said(tmp_path: Path) -> None:
    study(tmp_path)
    with pytest.raises(InputError, match="bigplan experiment run"):
        find_subject(str(tmp_path / "study.yaml"))
    with pytest.raises(InputError, match=r"holds no summary\.json"):
        find_subject(str(tmp_path))
    with pytest.raises(InputError, match="no such file or folder"):
        find_subject("dgx-h10")
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with pytest.raises(InputError, match="unknown key 'a'"):
        find_subject(str(tmp_path / "x.yaml"))
