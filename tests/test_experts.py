"""Models with experts from end to end of the planner: plans, what they tell, what refuses them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigplan.cli.app import app
from bigplan.engines import ENGINES, make_plan
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.errors import InputError, RefusedError
from bigplan.export import TOOLS, configuration
from bigplan.graph.strategy import Strategy
from bigplan.placement import may_capture
from bigplan.plan import Plan, graph_of
from bigplan.planner import Request
from bigplan.report.decision import decision
from bigplan.report.stages import stages_of
from bigplan.solve.candidate import Candidate, Workload
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training, TrainingRequest, resolve

SMALL = find_model("qwen3-0.6b")
# The dense model's matrices for a token, split over 4 of 16 experts.
ROUTED = ModelSpec.model_validate(
    SMALL.model_dump()
    | {"name": "routed", "ffn": SMALL.ffn // 4, "experts": 16, "experts_per_token": 4}
)
TRAINING = Training(sequence_length=1024, global_batch=16)


@cache
def planned(model: ModelSpec, cluster: str = "h200-1x") -> Plan:
    return make_plan(Request(model, TRAINING, find_cluster(cluster), engine="native"))


def test_a_plan_is_slower_than_that_of_a_dense_model_of_equal_flops() -> None:
    """It computes as much, and has three times as many parameters of experts to update besides."""
    dense, routed = planned(SMALL).predicted, planned(ROUTED).predicted
    assert ROUTED.parameter_count > 2 * SMALL.parameter_count
    assert ROUTED.active_parameter_count == pytest.approx(SMALL.parameter_count, rel=0.01)
    assert 1.1 < routed.step_seconds / dense.step_seconds < 3
    assert routed.mfu * routed.step_seconds == pytest.approx(
        dense.mfu * dense.step_seconds, rel=0.02
    )


def test_a_plan_tells_the_parameters_that_a_token_passes() -> None:
    for model, told in ((ROUTED, "parameters, 596.5 M for a token)"), (SMALL, "parameters) on")):
        plan = planned(model)
        assert told in decision(plan, stages_of(plan))


def test_passes_are_captured_only_where_nothing_waits() -> None:
    for cluster, captured in (("h200-1x", True), ("rtx-4090-workstation", False)):
        workload = Workload(ROUTED, TRAINING, find_cluster(cluster).group)
        candidate = Candidate.of(workload, Strategy(dp=1))
        assert candidate.costs.captures == captured
    plan = planned(ROUTED, "rtx-4090-workstation")
    assert not may_capture(graph_of(plan), plan.placement)


@pytest.mark.parametrize("engine", ["deepspeed", *FRAMEWORKS])
def test_other_engines_refuse_experts(engine: str) -> None:
    asked = Request(ROUTED, TRAINING, find_cluster("h200-1x"), engine=engine)
    with pytest.raises(RefusedError, match="routed has 16 in each block; plan with --engine nat"):
        make_plan(asked)
    if engine in ENGINES:
        assert "16 in each block" in str(ENGINES[engine].refusal(ROUTED, TRAINING, Strategy(dp=1)))


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_written_for_other_tools(tool: str) -> None:
    with pytest.raises(RefusedError, match=f"its own runtime alone, not for {tool}"):
        configuration(planned(ROUTED), tool)


def test_files_of_other_tools_are_not_priced_with_experts(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    given = ["--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--seq-len", "4096"]
    found = CliRunner().invoke(app, ["import", str(file), "--from", "deepspeed", *given])
    assert isinstance(found.exception, RefusedError)
    assert "mixtral-8x7b has 8 in each block" in " ".join(str(found.exception).split())


def test_experts_are_not_planned_in_fp8() -> None:
    with pytest.raises(InputError, match="products of experts are not planned in fp8, and routed"):
        resolve(TrainingRequest(fp8_gemms=True), ROUTED)
    assert resolve(TrainingRequest(fp8_gemms=True), SMALL).fp8_gemms
