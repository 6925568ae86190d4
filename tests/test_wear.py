"""What a training may write to drives is a limit that plans keep."""

import re
from dataclasses import replace

import pytest

from bigplan.errors import InfeasibleError, InputError
from bigplan.planner import Request, make_plan
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.experiment import make_experiment
from bigplan.spec.training import Training
from bigplan.wear import allowed_bytes, require_wear, wear_of, worn_out

pytestmark = pytest.mark.usefixtures("first_plans")

MODEL = find_model("llama-3-8b").model_copy(update={"layers": 2})
TRAINING = Training(sequence_length=1024, global_batch=4, tokens=10**8)
# State that half of the host's memory would hold, but for what the limit keeps off the drive.
CLUSTER = find_cluster("rtx-4090-workstation").with_caps(gpu=12 << 30, host=28 << 30)
PINNED: dict[str, str | int | float] = {
    "micro_batch": 4,
    "recompute": "full",
    "activations": "gpu",
    "streamed": 0,
    "slots": 2,
    "sums": 1,
    "shared_ends": 1,
}


def test_a_plan_keeps_the_limit_and_one_without_host_memory_says_what_would_do() -> None:
    free = Request(MODEL, TRAINING, CLUSTER, {**PINNED, "optimizer.nvme": 0.5})
    plan = make_plan(free)
    wear = wear_of(plan)
    assert wear is not None
    assert wear.job_share is not None
    request = replace(free, settings=PINNED, max_wear=wear.job_share / 2)
    less = wear_of(make_plan(request))
    assert less is None or (less.job_share or 0.0) <= wear.job_share / 2 * 1.001
    # Where nothing fits because of it, the limit is named first, with the one that is enough.
    with pytest.raises(InfeasibleError, match=r"^max_wear") as refused:
        make_plan(replace(free, max_wear=wear.job_share / 2))
    enough = re.match(r"--max-wear ([\d.e-]+)", refused.value.remedy)
    assert enough is not None, refused.value.remedy
    assert wear.job_share / 2 < float(enough[1]) < 1.01 * wear.job_share
    make_plan(replace(free, max_wear=float(enough[1])))
    with pytest.raises(InfeasibleError, match="max_wear is 0"):
        require_wear(plan, 0.0)
    assert require_wear(plan, wear.job_share) is plan


def test_the_limit_is_of_the_job_and_needs_its_length() -> None:
    nodes = CLUSTER.group
    assert nodes.nvme is not None
    assert nodes.nvme.endurance is not None
    rated, steps = nodes.nvme.endurance * nodes.nvme.drives, 10**8 / TRAINING.tokens_per_step
    assert allowed_bytes(0.1, TRAINING, nodes) == pytest.approx(0.1 * rated / steps)
    assert allowed_bytes(None, TRAINING, nodes) is None
    unknown = nodes.nvme.model_copy(update={"endurance": None})
    with pytest.raises(InputError, match="endurance"):
        allowed_bytes(0.1, TRAINING, nodes.model_copy(update={"nvme": unknown}))
    named = {"model": "llama-3-8b", "cluster": "rtx-4090-workstation", "max_wear": 0.1}
    with pytest.raises(InputError, match=r"training\.tokens.*training\.steps"):
        make_experiment(named)
    ran = TRAINING.model_copy(update={"tokens": None, "steps": 500})
    assert allowed_bytes(0.1, ran, nodes) == pytest.approx(0.1 * rated / 500)
    for length in ({"training": {"steps": 500}}, {"launch": {"steps": 500}}):
        assert make_experiment(named | length).resolved_training().steps == 500


def test_without_the_limit_no_error_is_told_otherwise() -> None:
    error = InfeasibleError("does not fit")
    assert worn_out(error, 0.1, TRAINING, CLUSTER.group) is error
