"""A plan written for a tool and read again is the same strategy, with the same prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigplan.engines import make_plan
from bigplan.export import TOOLS as WRITTEN
from bigplan.graph.graph import Recompute
from bigplan.intake import TOOLS, Given
from bigplan.intake.appraisal import appraised
from bigplan.intake.completed import completed
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.experiment import make_experiment
from bigplan.spec.hardware import with_hardware
from bigplan.spec.training import Training
from tests.engines.deepspeed.test_search import Settings

EIGHT, ONE = find_cluster("hgx-h200"), find_cluster("h200-1x")
TIGHT, HELD = EIGHT.with_caps(gpu=24 << 30), ONE.with_caps(gpu=24 << 30)
TWO = EIGHT.with_nodes(2)
NAMES = {"deepspeed": "ds_config.json", "accelerate": "accelerate.yaml", "megatron": "megatron.sh"}
NAMES["torchtitan"] = "torchtitan.toml"
CASES: tuple[tuple[str, Cluster, Settings], ...] = (
    ("megatron", EIGHT, {"tp": 2, "pp": 2}),
    ("megatron", EIGHT, {"tp": 2, "pp": 2, "first_blocks": 7, "sequence_parallel": 0}),
    ("megatron", EIGHT, {"pp": 2, "vpp": 2, "micro_batch": 1, "zero": 1}),
    ("megatron", EIGHT, {"zero": 3, "tp": 1}),
    ("megatron", EIGHT, {"zero": 0, "tp": 2, "pp": 1}),
    ("megatron", TIGHT, {"recompute.full": 5, "pp": 1}),
    ("megatron", TIGHT, {"optimizer.host": 0.5, "tp": 1}),
    ("torchtitan", EIGHT, {}),
    ("torchtitan", EIGHT, {"tp": 2, "pp": 2, "zero": 2}),
    ("torchtitan", with_hardware(EIGHT, {"gpus_per_node": 4}), {"pp": 4, "vpp": 2}),
    ("torchtitan", TIGHT, {"recompute": "full", "zero": 3}),
    ("torchtitan", TIGHT, {"parameters": "host"}),
    ("accelerate", EIGHT, {"zero": 2}),
    ("accelerate", EIGHT, {"zero": 0}),
    ("accelerate", TIGHT, {"recompute": "full"}),
    ("accelerate", HELD, {"parameters": "host"}),
    ("megatron", TWO, {"zero": 1, "zero_group": 4, "tp": 2, "pp": 1}),
    ("megatron", TWO, {"zero": 3, "zero_group": 8, "tp": 1}),
    ("torchtitan", TWO, {"zero": 3, "zero_group": 4, "tp": 2, "pp": 1}),
    ("accelerate", TWO, {"zero": 2, "zero_group": 8}),
    ("deepspeed", HELD, {}),
    ("deepspeed", EIGHT, {"zero": 1}),
    ("deepspeed", find_cluster("dgx-h100"), {"optimizer": "nvme", "parameters": "nvme"}),
    ("deepspeed", TIGHT, {"zero": 3, "optimizer.host": 0.5}),
)


def plan_of(engine: str, cluster: Cluster, settings: Settings) -> Plan:
    training = Training(sequence_length=4096, global_batch=32)
    model = find_model("llama-like-5.5b")
    return make_plan(Request(model, training, cluster, settings, engine=engine))


@pytest.mark.parametrize(("engine", "cluster", "settings"), CASES)
def test_what_is_written_is_read_again(
    engine: str, cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    plan = plan_of(engine, cluster, settings)
    for name, text in WRITTEN[engine](plan).files.items():
        (tmp_path / name).write_text(text)
    given = Given(plan.config.get("environment", {}))
    setup = TOOLS[engine](tmp_path / NAMES[engine], given)
    assert setup.unpriced == ()
    left = {f"training.{key}": value for key, value in setup.training.items()}
    if engine in ("deepspeed", "accelerate"):  # whose files leave these to the training script
        left |= {"training.sequence_length": 4096, "training.global_batch": 32}
        left |= {"set": _script(plan)}
    described = {"model": "llama-like-5.5b", "cluster": cluster.model_dump(mode="json")}
    experiment = make_experiment(described | left)
    found = appraised(completed(setup, experiment, NAMES[engine]), NAMES[engine])
    assert found.plan.strategy == plan.strategy
    assert found.plan.placement == plan.placement
    assert found.plan.predicted == plan.predicted
    assert found.short == {}


def test_the_window_that_megatron_is_told_is_read_again(tmp_path: Path) -> None:
    """With it the price is the plan's; without it the price says what it leaves out."""
    training = Training(sequence_length=8192, global_batch=32)
    plan = make_plan(Request(find_model("mistral-7b"), training, EIGHT, engine="megatron"))
    (script,) = WRITTEN["megatron"](plan).files.values()
    assert "--window-size 4095,0" in script
    for text, told in ((script, False), (script.replace("--window-size 4095,0", ""), True)):
        (tmp_path / "megatron.sh").write_text(text)
        setup = TOOLS["megatron"](tmp_path / "megatron.sh", Given({}))
        left = {f"training.{key}": value for key, value in setup.training.items()}
        described = {"model": "mistral-7b", "cluster": EIGHT.model_dump(mode="json")}
        ready = completed(setup, make_experiment(described | left), "megatron.sh")
        assert any("attention to all 8192" in each for each in ready.setup.unpriced) == told
        assert appraised(ready, "megatron.sh").plan.predicted == plan.predicted


def _script(plan: Plan) -> dict[str, str | int]:
    """Decisions of the model's own code."""
    again = plan.placement.stages[0].kinds["block"].activations.get(Recompute.FULL)
    found: dict[str, str | int] = {"micro_batch": plan.strategy.micro_batch}
    found["recompute"] = "full" if again else "none"
    if plan.engine == "deepspeed":
        found["loss_chunk"] = plan.placement.loss_chunk
    return found
