"""DeepSpeed's compiled operators: AdamW on the CPU, and state and parameters on a drive.

The first run on a machine compiles them, for about a minute of a core each (`make test-compiled`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bigplan.engines import engine_of, make_plan
from bigplan.engines.deepspeed import sizes
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.search import DeepSpeedSearch
from bigplan.plan import Plan, save_plan
from bigplan.planner import Request
from bigplan.runtime.deepspeed.config import needed
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.catalog import find_model
from tests.engines.deepspeed.test_search import Settings
from tests.runtime.deepspeed.ranks import Case
from tests.runtime.deepspeed.test_worker import BF16, PART16, UNIT32, WIDE, planned, trained
from tests.tiny import small_cluster

pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
pytestmark = pytest.mark.timeout(1800)

AIO = Path("/usr/include/libaio.h").exists()
OFFLOAD: Settings = {"micro_batch": 1, "recompute": "full"}


def plans() -> dict[str, Plan]:
    found = {
        "host-2": planned(1, {**OFFLOAD, "zero": 2, "optimizer": "host"}, BF16),
        "host-3": planned(1, {**OFFLOAD, "zero": 3, "optimizer": "host"}, WIDE),
        "ratio": planned(1, {**OFFLOAD, "zero": 3, "optimizer.host": 0.5}, WIDE),
    }
    if AIO:
        drive: Settings = {**OFFLOAD, "zero": 3, "optimizer": "nvme"}
        found["drive"] = planned(1, {**drive, "parameters": "gpu"}, WIDE)
        found["drive-all"] = planned(1, {**drive, "parameters": "nvme"}, WIDE)
    return found


def ran(folder: Path, cases: Mapping[str, object]) -> Any:
    """By case, what came of it."""
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.deepspeed.ranks", "1", str(listed), "unused"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(Path(f"{listed}.0").read_text())


@pytest.mark.skipif(not AIO, reason="libaio's headers are not installed")
def test_state_on_a_drive_takes_the_host_memory_that_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sub-groups of a few parameters, as those of billions are; smaller ones stay in memory."""
    monkeypatch.setattr(sizes, "SWAPPED_SUB_GROUP", 400_000)
    drive: Settings = {**OFFLOAD, "zero": 3, "optimizer": "nvme", "parameters": "gpu"}
    request = Request(
        find_model("tiny-llama-demo"), trained(WIDE), small_cluster(1), drive, engine="deepspeed"
    )
    plan = make_plan(request)
    engine_of(plan).prepare(plan, lambda text: None)
    save_plan(plan, tmp_path / "plan.yaml")
    case = asdict(Case(str(tmp_path / "plan.yaml"), 2))
    first, second = ran(tmp_path, {"drive": case})["drive"]["swapping"]
    promised = defaultdict[str, int](int)
    for purpose, nbytes in DeepSpeedSearch(request).tried(Decisions.of(plan)).held.host():
        promised[purpose] += nbytes
    aligned = 1024 * plan.config["json"]["aio"]["intra_op_parallelism"]
    buffers = plan.config["json"]["zero_optimization"]["offload_optimizer"]["buffer_count"]
    assert 0 <= first["buffers"] - promised["staging"] <= buffers * aligned
    # Of sub-groups on the drive the first update leaves moments in memory, those below 1 MiB never
    # leave it.
    assert first["beside"] == 8 * first["elements"] > 0.9 * promised["optimizer"]
    small = plan.model.parameter_count - first["elements"]
    assert promised["optimizer"] == first["beside"] + 8 * small
    assert second["beside"] == 0


def test_offloaded_runs_have_the_native_engines_losses(tmp_path: Path) -> None:
    cases, reference = {}, []
    for name, plan in plans().items():
        engine_of(plan).prepare(plan, lambda text: None)
        assert "cpu_adam" in needed(plan.config)
        path = tmp_path / f"{name}.yaml"
        save_plan(plan, path)
        cases[name] = asdict(Case(str(path), save=str(tmp_path / f"{name}-saved")))
    for name in ("host-2", "host-3"):
        again = Case(str(tmp_path / f"{name}.yaml"), 1, resume=str(tmp_path / f"{name}-saved"))
        cases[f"resumed-{name}"] = asdict(again)
    found = ran(tmp_path, cases)
    worker = NativeWorker(planned(1, {}, WIDE, engine="native"), 0, tmp_path / "native")
    worker.start(tmp_path / "meeting")
    reference = [worker.step().loss for _ in range(3)]
    worker.close()
    for name in plans():
        for step, (here, there) in enumerate(zip(found[name]["losses"], reference, strict=True)):
            bound = UNIT32 * (there + step) + PART16 * abs(reference[0] - there)
            assert abs(here - there) <= bound, (name, step, here, there)
    for name, plan in plans().items():
        request = Request(plan.model, plan.training, plan.cluster, engine="deepspeed")
        sizes = DeepSpeedSearch(request).tried(Decisions.of(plan)).held.sizes
        grouped = found[name]["groups"]
        assert grouped in ([], list(sizes.groups)), name  # only ZeRO 3 groups its state
        assert bool(grouped) == (name != "host-2")
    assert len(found["ratio"]["groups"]) > 10
    for name in ("host-2", "host-3"):
        assert found[f"resumed-{name}"]["digest"] == found[name]["digest"], name
