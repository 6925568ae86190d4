from dataclasses import replace

from bigplan.graph.strategy import Strategy
from bigplan.graph.told import strategy_text
from bigplan.report.decision import decision
from bigplan.report.stages import stages_of
from bigplan.spec.cluster import Member
from tests.report.test_bill import writing
from tests.tiny import tiny_plan
from tests.wording import tells


def test_what_is_recomputed_is_counted_by_policy() -> None:
    plan = tiny_plan()
    stages = stages_of(plan)
    assert decision(plan, stages).endswith("nothing is recomputed.")
    mixed = [replace(stages[0], recompute={"full": 1, "selective": 1})]
    assert tells(decision(plan, mixed), "1 of 2", "recomputed", "1 of 2", "selectively")


def test_captured_blocks_are_told() -> None:
    plan = tiny_plan()
    placement = plan.placement.model_copy(update={"captured": True})
    captured = plan.model_copy(update={"placement": placement})
    assert "CUDA graphs" in decision(captured, stages_of(captured))
    assert "CUDA graphs" not in decision(plan, stages_of(plan))


def test_gpus_of_larger_nodes_that_count_as_smaller_ones_are_told_to_idle() -> None:
    plan = tiny_plan()
    each = plan.cluster.group.gpus_per_node
    group = plan.cluster.group.model_copy(update={"nodes": 3})

    def told(gpus: int) -> str:
        members = (
            Member(name="small", nodes=2, gpus=each, gpu="one"),
            Member(name="large", nodes=1, gpus=gpus, gpu="other"),
        )
        cluster = plan.cluster.model_copy(update={"node_groups": (group,), "members": members})
        mixed = plan.model_copy(update={"cluster": cluster})
        return decision(mixed, stages_of(mixed))

    assert f"2 of small and 1 of large with 3 of a node's {each + 3} GPUs idle" in told(each + 3)
    assert "idle" not in told(each)


def test_drives_that_training_wears_out_within_three_years_are_told_at_once() -> None:
    def told(days: float, drives: int = 1) -> str:
        plan = writing(10**9, 86.4, endurance=round(days * 2e12 / drives), drives=drives)
        return decision(plan, stages_of(plan))

    assert tells(told(280), "drive", "worn out", "280 days")
    assert tells(told(1000, 2), "2 drives", "worn out", "2.74 years")
    assert "worn out" not in told(1100)


def test_wear_is_judged_over_the_whole_training_where_its_length_is_known() -> None:
    def told(steps: int) -> str:
        plan = writing(10**9, 86.4, endurance=10**14)  # 50,000 steps
        tokens = steps * plan.training.tokens_per_step
        training = plan.training.model_copy(update={"tokens": tokens})
        return decision(plan.model_copy(update={"training": training}), stages_of(plan))

    assert tells(told(5000), "10% of the writes", "drive", "50 days")
    assert "drive" not in told(50).rsplit(";", 1)[-1]


def test_without_tokens_the_steps_that_run_are_the_training() -> None:
    def told(steps: int) -> str:
        plan = writing(10**9, 86.4, endurance=10**14)
        training = plan.training.model_copy(update={"steps": steps})
        return decision(plan.model_copy(update={"training": training}), stages_of(plan))

    assert tells(told(5000), "5,000 steps take 10% of the writes", "50 days")
    # So few take nothing worth a word, yet a training on that machine would be long.
    assert tells(told(20), "worn out", "50 days")


def test_one_of_a_kind_is_told_so() -> None:
    plan = tiny_plan()
    one = plan.training.model_copy(update={"global_batch": 1, "sequence_length": 4096})
    text = decision(plan.model_copy(update={"training": one}), stages_of(plan))
    assert "1 sequence of 4,096 tokens a step" in text


def test_what_leaves_the_gpu_is_listed() -> None:
    plan = tiny_plan()
    stage = stages_of(plan)[0]
    away = {**stage.placement, "optimizer": {"host": 1.0}, "gradients": {"gpu": 0.5, "nvme": 0.5}}
    text = decision(plan, [replace(stage, placement=away)])
    assert tells(text, "off the GPU", "gradients and optimizer state")
    assert "everything stays on the GPU" in decision(plan, [stage])


def test_what_is_streamed_is_a_share_of_the_optimizer_state() -> None:
    plan = tiny_plan()
    stage = stages_of(plan)[0]
    some, none, whole = (replace(stage, streamed_fraction=part) for part in (0.25, 0.0, 1.0))
    assert tells(decision(plan, [some]), "25%", "optimizer state", "streamed")
    assert tells(decision(plan, [none, some]), "up to 25%", "optimizer state", "streamed")
    assert "streamed" not in decision(plan, [none])
    assert tells(decision(plan, [whole]), "all of", "optimizer state", "streamed")


def test_uneven_ends_and_missing_sequence_parallelism_are_told() -> None:
    strategy = Strategy(
        dp=1, tp=2, pp=4, vpp=2, first_blocks=3, last_blocks=2, sequence_parallel=False
    )
    text = strategy_text(strategy)
    assert tells(text, "tensor parallel 2", "pipeline 4", "2 virtual", "first", "3", "last", "2")
    assert tells(text, "no sequence parallelism", "micro-batch 1")
