"""DeepSpeed on a GPU: what is page-locked by its own means, beside the native engine's kernels.

Compiles two operators first, about a minute and a half on a machine that has not got them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bigplan.engines import engine_of, make_plan
from bigplan.plan import Plan, save_plan
from bigplan.planner import Request
from bigplan.runtime.deepspeed.config import needed
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.engines.deepspeed.test_search import Settings
from tests.runtime.deepspeed.ranks import Case
from tests.runtime.deepspeed.test_worker import PART16, UNIT32

pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

OFFLOAD: Settings = {"micro_batch": 1, "recompute": "full"}
WAYS: dict[str, tuple[Settings, str]] = {
    "gpu-2": ({**OFFLOAD, "zero": 2, "optimizer": "gpu"}, "fp32"),
    "host-2": ({**OFFLOAD, "zero": 2, "optimizer": "host"}, "bf16"),
    "host-3": ({**OFFLOAD, "zero": 3, "optimizer": "host", "parameters": "host"}, "fp32"),
    "ratio": ({**OFFLOAD, "zero": 3, "optimizer.host": 0.5}, "fp32"),
}
# The native engine's fused kernels round elsewhere than plain torch does: in one forward by 2^-9 of
# values of a few units, which the mean over tokens brings to less than this.
KERNELS = 2.0**-8


def planned(settings: Settings, gradients: str, engine: str = "deepspeed") -> Plan:
    training = Training.model_validate(
        {"sequence_length": 64, "global_batch": 4, "steps": 3, "gradient_precision": gradients}
    )
    model, cluster = find_model("tiny-llama-demo"), find_cluster("h200-1x")
    return make_plan(Request(model, training, cluster, settings, engine=engine))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, cases = tmp_path_factory.mktemp("deepspeed-gpu"), {}
    for name, (settings, gradients) in WAYS.items():
        plan = planned(settings, gradients)
        engine_of(plan).prepare(plan, lambda text: None)
        save_plan(plan, folder / f"{name}.yaml")
        cases[name] = asdict(Case(str(folder / f"{name}.yaml"), save=str(folder / name)))
    again = Case(str(folder / "host-2.yaml"), 1, resume=str(folder / "host-2"))
    cases["resumed"] = asdict(again)
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.runtime.deepspeed.ranks", "1", str(listed), "unused"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(Path(f"{listed}.0").read_text())
    return found


def test_losses_stay_near_the_native_engines(ran: dict[str, Any], tmp_path: Path) -> None:
    worker = NativeWorker(planned({}, "fp32", "native"), 0, tmp_path)
    worker.start(tmp_path / "meeting")
    reference = [worker.step().loss for _ in range(3)]
    worker.close()
    for name in WAYS:
        for here, there in zip(ran[name]["losses"], reference, strict=True):
            bound = UNIT32 * there + KERNELS + PART16 * abs(reference[0] - there)
            assert abs(here - there) <= bound, (name, here, there)


def test_offloaded_runs_page_lock_in_blocks_of_their_own_size() -> None:
    plan = planned(*WAYS["host-2"])
    assert needed(plan.config) == ["cpu_adam", "pin_memory"]


def test_a_resumed_run_goes_on(ran: dict[str, Any]) -> None:
    """Attention's backward has other bits every time, so this is no comparison of bits."""
    whole, resumed = ran["host-2"], ran["resumed"]
    assert resumed["begun"] == 2
    assert resumed["losses"][0] == pytest.approx(whole["losses"][2], abs=KERNELS)
