"""DeepSpeed for real, on the CPU: one and two processes, ZeRO 0 to 3, two pipeline stages.

All against the native engine.

**How far apart losses may be.** Both engines start from equal weights, see equal batches and
compute with the same functions. In fp32 they differ by the order of sums alone: `UNIT32` of the
loss, and as much again for each step. In bf16 DeepSpeed's gradients are what autograd gives,
rounded to 8 bits, where the native engine's products add in fp32. AdamW divides by the size of a
gradient, so an update's relative error is that of the gradient, 2^-9, and the loss differs by no
more than 2^-8 of what the updates have moved it by.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bigplan.engines import engine_of, make_plan
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.plan import Plan, save_plan
from bigplan.planner import Request
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.catalog import find_model
from bigplan.spec.training import Training, ValidationSpec
from tests.engines.deepspeed.test_search import Settings
from tests.runtime.deepspeed.ranks import Case
from tests.tiny import small_cluster

pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
STEPS = 3
UNIT32, PART16 = 2.0**-20, 2.0**-8
SECONDS = 500.0
VALIDATION = ValidationSpec(data="bundled", every=1, batches=1)


def trained(changes: Mapping[str, object]) -> Training:
    wanted = {"sequence_length": 32, "global_batch": 4, "precision": "fp32", "steps": 5}
    return Training.model_validate({**wanted, "validation": VALIDATION, **changes})


def planned(
    ranks: int,
    settings: Settings,
    training: Mapping[str, object] | None = None,
    *,
    engine: str = "deepspeed",
    changes: Mapping[str, object] | None = None,
) -> Plan:
    model = find_model("tiny-llama-test").model_copy(update=changes)
    cluster = small_cluster(ranks)
    return make_plan(Request(model, trained(training or {}), cluster, settings, engine=engine))


def by_torch(plan: Plan) -> Plan:
    """The same plan with torch's AdamW on the CPU in place of one that is compiled for minutes."""
    config = json.loads(json.dumps(dict(plan.config)))
    config["json"]["zero_force_ds_cpu_optimizer"] = False
    return plan.model_copy(update={"config": config})


BF16 = {"precision": "bf16", "gradient_precision": "bf16"}
WIDE = {"precision": "bf16"}
# A table that both ends read, and a window of few of a sequence's tokens.
TIED = {"tied_embeddings": True, "sliding_window": 5}
ON_GPU: Settings = {"optimizer": "gpu", "parameters": "gpu", "micro_batch": 1, "recompute": "none"}


@cache
def plans(ranks: int) -> dict[str, Plan]:
    """Of one rank what is not shared, what is gathered, and what goes on; two have the rest."""
    stages = (0, 1, 3) if ranks == 1 else range(4)
    found = {f"zero-{stage}": planned(ranks, {**ON_GPU, "zero": stage}) for stage in stages}
    if ranks == 1:
        return found
    offload: Settings = {"micro_batch": 1, "recompute": "full", "optimizer": "host"}
    everything: Settings = {**offload, "zero": 3, "parameters": "host"}
    for stage in (0, 1, 3):  # of stage 2: offload-2
        found[f"zero-{stage}-bf16"] = planned(ranks, {**ON_GPU, "zero": stage}, BF16)
    found |= {
        "offload-3": by_torch(planned(ranks, everything, WIDE)),
        "zero-1-wide": planned(ranks, {**ON_GPU, "zero": 1}, WIDE),
        "tied": planned(ranks, {**ON_GPU, "zero": 3}, changes=TIED),
        "offload-2": by_torch(planned(ranks, {**offload, "zero": 2}, BF16)),
    }
    return found | pipelines()


def pipelines() -> dict[str, Plan]:
    """Two stages: the optimizers that DeepSpeed has for them, one case each."""
    split: Settings = {**ON_GPU, "pp": 2}
    host: Settings = {**split, "zero": 1, "recompute": "full", "optimizer": "host"}
    return {
        "pipe-0": planned(2, {**split, "zero": 0}),
        "pipe-1-bf16": planned(2, {**split, "zero": 1}, BF16),
        "pipe-1-wide": planned(2, {**split, "zero": 1, "recompute": "full"}, WIDE),
        "pipe-0-tied": planned(2, {**split, "zero": 0}, changes=TIED),
        "pipe-1-offload": by_torch(planned(2, host, BF16)),
    }


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process of the native engine: by precision, losses, validation, a checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("fp32", "bf16", "tied"):
        folder = tmp_path_factory.mktemp(f"native-{name}")
        precision = WIDE if name == "bf16" else {}
        plan = planned(1, {}, precision, engine="native", changes=TIED if name == "tied" else None)
        worker = NativeWorker(plan, 0, folder)
        worker.start(folder / "meeting")
        losses = [worker.step().loss for _ in range(2)]
        saved = worker.save(folder)
        losses.append(worker.step().loss)
        found[name] = {"losses": losses, "saved": str(saved), "evaluated": worker.evaluate()}
        worker.close()
    return found


@pytest.fixture(scope="module", params=[1, 2])
def ran(
    request: pytest.FixtureRequest,
    native: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """By rank and case, what came of it."""
    ranks, folder = request.param, tmp_path_factory.mktemp("deepspeed")
    cases = {}
    for name, plan in plans(ranks).items():
        path = folder / f"{name}.yaml"
        save_plan(plan, path)
        save = "" if "bf16" in name else str(folder / f"{name}-saved")
        evaluate = name in (*native, "pipe-0-tied")
        cases[name] = asdict(Case(str(path), STEPS, save=save, evaluate=evaluate))
    again = asdict(Case(str(folder / "zero-1.yaml"), 1))
    cases["resumed-native"] = again | {"resume": native["fp32"]["saved"], "evaluate": True}
    if ranks == 2:
        again = asdict(Case(str(folder / "pipe-0.yaml"), 1))
        cases["resumed-native-pipe"] = again | {"resume": native["fp32"]["saved"], "evaluate": True}
    for name in resumed(ranks):
        saved = str(folder / f"{name}-saved")
        plan_path = str(folder / f"{name}.yaml")
        cases[f"resumed-{name}"] = asdict(Case(plan_path, 1, resume=saved))
    # DeepSpeed keeps a pipeline's grid for the life of a process: what comes next has to be one.
    cases = dict(sorted(cases.items(), key=lambda item: "pipe" in item[0]))
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(ranks)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.runtime.deepspeed.ranks"),
            *(str(ranks), str(listed), str(folder / "meeting")),
        ],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{listed}.{rank}").read_text()) for rank in range(ranks)]


def resumed(ranks: int) -> list[str]:
    both = ["zero-0", "zero-3"]
    if ranks == 1:
        return both
    return [*both, "offload-2", "zero-1-wide", "pipe-1-wide", "pipe-1-offload"]


def allowed(name: str, reference: list[float], step: int) -> float:
    moved = abs(reference[0] - reference[step])
    part = PART16 if "bf16" in name or "offload" in name or "wide" in name else UNIT32
    return UNIT32 * reference[0] + part * moved + UNIT32 * step


def test_losses_are_those_of_the_native_engine(
    ran: list[dict[str, Any]], native: dict[str, dict[str, Any]]
) -> None:
    for name, found in ran[0].items():
        if name.startswith("resumed"):
            continue
        low = any(word in name for word in ("bf16", "offload", "wide"))
        kind = "tied" if "tied" in name else "bf16" if low else "fp32"
        reference = native[kind]["losses"]
        for step, (here, there) in enumerate(zip(found["losses"], reference, strict=True)):
            assert abs(here - there) <= allowed(name, reference, step), (name, step, here, there)


def test_ranks_agree_on_losses_and_weights(ran: list[dict[str, Any]]) -> None:
    for results in zip(*(rank.values() for rank in ran), strict=True):
        assert len({tuple(found["losses"]) for found in results}) == 1
        assert len({found["digest"] for found in results}) == 1
        assert results[0]["digest"]
        assert results[0]["measured"] == ["nvme"]  # a process tells no tensors from libraries


def test_validation_is_that_of_the_native_engine(
    ran: list[dict[str, Any]], native: dict[str, dict[str, Any]]
) -> None:
    """From the checkpoint of the native engine and one more step, in fp32."""
    for name in {"resumed-native", "resumed-native-pipe"} & ran[0].keys():
        found = ran[0][name]
        assert found["begun"] == 2
        assert found["losses"][0] == pytest.approx(native["fp32"]["losses"][2], rel=UNIT32)
        assert found["evaluated"] == pytest.approx(native["fp32"]["evaluated"], rel=4 * UNIT32)


def test_a_resumed_run_has_the_same_bits(ran: list[dict[str, Any]]) -> None:
    for name in resumed(len(ran)):
        whole, again = ran[0][name], ran[0][f"resumed-{name}"]
        assert again["begun"] == 2
        assert again["losses"][0] == whole["losses"][2], name
        assert again["digest"] == whole["digest"], name


def test_the_native_engine_goes_on_from_deepspeeds_checkpoint(
    ran: list[dict[str, Any]], native: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for name, kind in (("zero-3", "fp32"), ("pipe-0", "fp32"), ("pipe-0-tied", "tied")):
        if name not in ran[0]:
            continue
        scratch = tmp_path / name
        worker = NativeWorker(
            planned(1, {}, engine="native", changes=TIED if kind == "tied" else None), 0, scratch
        )
        assert worker.start(tmp_path / f"meeting-{name}", Path(ran[0][name]["saved"])) == 2
        loss = worker.step().loss
        worker.close()
        assert loss == pytest.approx(native[kind]["losses"][2], rel=UNIT32), name


def test_events_are_of_the_grain_that_is_predicted(ran: list[dict[str, Any]]) -> None:
    found = plans(len(ran))
    checked = {"zero-0", "zero-2", "pipe-0", "pipe-0-tied", "pipe-1-offload"}
    for name in checked & found.keys():
        plan = found[name]
        every = engine_of(plan).timeline(plan).events
        for rank, results in enumerate(ran):
            stage = rank if plan.strategy.pp > 1 else 0
            predicted = [(e.op, e.micro_batch) for e in every if e.stage == stage]
            measured = [tuple(event) for event in results[name]["events"]]
            assert measured == predicted, (name, rank)
            assert results[name]["ended"] == len(results[name]["losses"]) * len(predicted)


def test_plans_place_what_the_cases_say() -> None:
    found = {name: Decisions.of(plan) for name, plan in plans(2).items()}
    assert [found[f"zero-{stage}"].stage for stage in range(4)] == [0, 1, 2, 3]
    assert found["offload-3"].recompute
    assert found["offload-3"].parameters == "host"
    assert found["offload-2"].state == "host"
    assert found["pipe-1-offload"].state == "host"
    assert found["pipe-1-wide"].recompute
    for name in pipelines():
        assert found[name].strategy.pp == 2
        assert found[name].stage == int(name[5])
