"""Peak memory part by part: toys by hand, and figures that papers printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.cost.framework import (
    DEEPSPEED,
    FSDP,
    MEGATRON,
    MEGATRON_DEEPSPEED,
    PLAIN,
    PYTORCH,
    Framework,
)
from bigplan.cost.memory import ALONE_BYTES, BASE_BYTES, FRAGMENTS, framework_memory
from bigplan.cost.step import Execution
from bigplan.graph.build import build_graph
from bigplan.graph.graph import ElementSizes, Graph, Recompute, Tensor
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.step import StepOp
from bigplan.spec.training import Training
from tests.toys import toy_graph, toy_kind

USUAL = Execution()
BARE = Framework("bare")
EACH = toy_kind("block").parameters  # of every layer of a toy
GB = 10**9


def _memory(
    graph: Graph, run: Execution = USUAL, framework: Framework = BARE, kind: str = "allocated"
) -> dict[str, float]:
    return framework_memory(graph, run, framework, kind)


# --- toys


def test_every_part_of_one_gpu() -> None:
    assert _memory(toy_graph(blocks=4, units=2)) == {
        "parameters": 6 * EACH * 2,
        "gradients": 6 * EACH * 4,
        "optimizer": 6 * EACH * 12,
        "activations": 4 * 64,
        "temporaries": 8,
        "buffers": 0,
        "base": 0,
    }


def test_tools_count_more_than_tensors() -> None:
    graph = toy_graph(Strategy(dp=2))
    tensors = sum(_memory(graph).values())
    shown = {kind: sum(_memory(graph, kind=kind).values()) for kind in FRAGMENTS}
    for kind, nbytes in shown.items():
        assert nbytes == pytest.approx(FRAGMENTS[kind] * tensors + BASE_BYTES[kind])
    assert shown["allocated"] < shown["reserved"] < shown["nvidia-smi"]


def test_one_gpu_has_no_communicators() -> None:
    found = [_memory(toy_graph(Strategy(dp=n)), kind="nvidia-smi")["base"] for n in (1, 2)]
    assert found == [ALONE_BYTES, BASE_BYTES["nvidia-smi"]]


@pytest.mark.parametrize(
    ("run", "kept", "temporaries"),
    [
        (USUAL, 64 + 30, 8),
        (Execution(recompute=Recompute.SELECTIVE), 32, 8),  # chains run again
        (Execution(recompute=Recompute.FULL), 16, 8 + 64 + 30),  # of the layer that is run again
        (Execution(recompute=Recompute.SELECTIVE, recomputed=0.5), (32 + 64 + 30) / 2, 8),
    ],
)
def test_chains_of_plain_kernels_keep_more(run: Execution, kept: float, temporaries: int) -> None:
    graph = toy_graph(blocks=4)
    chained = {StepOp.NORM: 20, StepOp.ACTIVATION: 10}
    block = replace(graph.kinds["block"], chained=chained)
    graph = replace(graph, kinds={**graph.kinds, "block": block})
    found = _memory(graph, run, replace(BARE, chains=PLAIN))
    assert (found["activations"], found["temporaries"]) == (4 * kept, temporaries)
    gates = replace(BARE, chains=frozenset({StepOp.ACTIVATION}))
    assert _memory(graph, framework=gates)["activations"] == 4 * (64 + 10)
    assert _memory(graph)["activations"] == 4 * 64


def test_replicas_of_plain_torch_hold_gradients_in_buckets_too() -> None:
    """DistributedDataParallel's buckets are copies unless `gradient_as_bucket_view`."""
    found = {
        strategy: _memory(toy_graph(strategy), framework=PYTORCH)["buffers"]
        for strategy in (Strategy(dp=1), Strategy(dp=2), Strategy(dp=2, zero=1))
    }
    assert list(found.values()) == [0, 6 * EACH * 4, 0]


def test_parameters_on_the_host_are_gathered_on_one_gpu_too() -> None:
    graph, live = toy_graph(blocks=9), replace(BARE, live_elements=7 * EACH)
    on_host = Execution(cpu_update=True, parameters_on_host=True)
    assert _memory(graph, on_host, live)["buffers"] == (7 + 2) * EACH * 2
    assert _memory(graph, framework=live)["buffers"] == 0


@pytest.mark.parametrize(
    ("run", "kept", "temporaries"),
    [
        (Execution(recompute=Recompute.SELECTIVE), 32, 8),
        (Execution(recompute=Recompute.FULL), 16, 8 + 64),  # the layer that is run again
        (Execution(recompute=Recompute.FULL, recomputed=0.5), (16 + 64) / 2, 8 + 64),
    ],
)
def test_recomputation_keeps_less(run: Execution, kept: float, temporaries: int) -> None:
    found = _memory(toy_graph(blocks=4), run)
    assert (found["activations"], found["temporaries"]) == (4 * kept, temporaries)


def test_boundaries_on_the_host_leave_two_on_the_gpu() -> None:
    run = Execution(recompute=Recompute.FULL, boundaries_on_host=True)
    assert _memory(toy_graph(blocks=40), run)["activations"] == 2 * 16


def test_an_update_on_the_cpu_takes_gradients_and_state_away() -> None:
    found = _memory(toy_graph(), Execution(cpu_update=True))
    assert (found["gradients"], found["optimizer"]) == (0, 0)


def test_state_that_comes_for_its_update_is_not_kept_on_the_gpu() -> None:
    kept, streamed = (_memory(toy_graph(), Execution(passing_bytes=n)) for n in (0, 8))
    assert streamed["optimizer"] == pytest.approx(kept["optimizer"] * (12 - 8) / 12)


def test_a_part_of_the_state_leaves_and_gradients_may_stay() -> None:
    whole = _memory(toy_graph())
    part = Execution(cpu_update=True, on_cpu=0.25)
    found = _memory(toy_graph(), part, replace(BARE, gradients_stay=True))
    assert found["optimizer"] == 0.75 * whole["optimizer"]
    assert found["gradients"] == whole["gradients"]


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)],
)
def test_zero_splits_states(zero: int, parameters: int, gradients: int, optimizer: int) -> None:
    found = _memory(toy_graph(Strategy(dp=4, zero=zero)))
    assert found["parameters"] == 6 * EACH * 2 / parameters
    assert found["gradients"] == 6 * EACH * 4 / gradients
    assert found["optimizer"] == 6 * EACH * 12 / optimizer


def test_a_pipeline_keeps_parameters_and_gradients_between_micro_batches() -> None:
    found = _memory(toy_graph(Strategy(dp=4, pp=2, zero=3), blocks=4))
    first = 3 * EACH  # two blocks and an end on each stage
    assert found["parameters"] == first * 2
    assert found["gradients"] == first * 4
    assert found["optimizer"] == first * 12 / 4


@pytest.mark.parametrize(("units", "in_flight"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_the_first_stage_holds_a_micro_batch_for_every_stage(units: int, in_flight: int) -> None:
    graph = toy_graph(Strategy(dp=1, pp=4), blocks=4, units=units)
    assert _memory(graph, kind="nvidia-smi")["activations"] == pytest.approx(
        FRAGMENTS["nvidia-smi"] * in_flight * 64
    )


def test_nvidia_smi_shows_the_first_stage_torch_the_fullest() -> None:
    graph = toy_graph(Strategy(dp=1, pp=2), blocks=2, units=1)
    head = replace(graph.kinds["head"], backward_workspace=10**6)  # the loss
    graph = replace(graph, kinds={**graph.kinds, "head": head})
    assert _memory(graph, kind="nvidia-smi")["temporaries"] < 100
    assert _memory(graph)["temporaries"] == 10**6


def test_buckets_hold_at_most_what_there_is() -> None:
    graph = toy_graph(Strategy(dp=2, zero=1))
    assert _memory(graph, framework=replace(BARE, bucket_elements=10))["buffers"] == 10 * 4
    huge = replace(BARE, bucket_elements=10**9)
    assert _memory(graph, framework=huge)["buffers"] == 6 * EACH * 4
    assert _memory(toy_graph(Strategy(dp=2)), framework=huge)["buffers"] == 0


def test_gathered_layers_take_memory() -> None:
    graph = toy_graph(Strategy(dp=2, zero=3), blocks=9)
    # Three blocks at once and both ends, in 2 bytes.
    assert _memory(graph)["buffers"] == (3 + 2) * EACH * 2
    live = replace(BARE, live_elements=7 * EACH)
    assert _memory(graph, framework=live)["buffers"] == (7 + 2) * EACH * 2


def test_an_update_copies_its_gradients_where_that_is_more() -> None:
    graph = toy_graph(Strategy(dp=2, zero=3), blocks=9)
    copying = replace(BARE, updated_elements=4 * EACH)
    found = _memory(graph, framework=copying)
    assert found == _memory(graph)  # gathered layers and activations are more
    graph = replace(graph, kinds={**graph.kinds, "block": toy_kind("block", saved=0)})
    graph = replace(graph, sizes=ElementSizes(parameter=2, gradient=2, state=12, master=True))
    copying = replace(BARE, updated_elements=10**9)
    found = _memory(graph, framework=copying)
    # All 11 layers of this rank's half: 2 bytes flattened, 4 in the master's precision.
    assert found["temporaries"] == 11 * EACH / 2 * (2 + 4)
    assert (found["activations"], found["buffers"]) == (0, 0)
    low = replace(graph, sizes=replace(graph.sizes, state=6))
    assert _memory(low, framework=copying)["optimizer"] == 11 * EACH / 2 * 6
    assert _memory(low, framework=copying)["temporaries"] < 11 * EACH / 2 * 6  # no cast
    on_cpu = Execution(cpu_update=True)
    assert _memory(graph, on_cpu, copying)["buffers"] > 0


def test_an_update_holds_tensors_in_place_of_gradients() -> None:
    flat = replace(BARE, update_tensors=12)
    kinds = {**toy_graph().kinds, "block": toy_kind("block", saved=0)}
    graph = replace(toy_graph(Strategy(dp=2, zero=1), blocks=9), kinds=kinds)
    usual, found = _memory(graph), _memory(graph, framework=flat)
    # Gradients are 4 bytes of all 11 layers, the update's tensors 12 of this rank's half.
    assert (usual["gradients"], usual["temporaries"]) == (11 * EACH * 4, 8)
    assert (found["gradients"], found["temporaries"]) == (0, 11 * EACH / 2 * 12)
    less = replace(BARE, update_tensors=4)
    assert _memory(graph, framework=less) == usual
    on_cpu = Execution(cpu_update=True)
    assert _memory(graph, on_cpu, flat) == _memory(graph, on_cpu)


def test_a_compiled_loss_holds_logits_and_their_gradient() -> None:
    """4 bytes a logit and the table's gradient; in eager torch 12 bytes a logit."""
    model = find_model("llama-3-8b")
    training = Training(sequence_length=8192, global_batch=8)
    graph = build_graph(model, training, Strategy(dp=1), None)
    eager, compiled = (
        _memory(graph, framework=replace(BARE, compiled_loss=flag))["temporaries"]
        for flag in (False, True)
    )
    table = 2 * model.vocab * model.hidden
    assert eager - compiled == 8192 * model.vocab * (12 - 4) - table
    in_place = replace(BARE, compiled_loss=True, in_place=True)  # its graph has no such temporaries
    assert _memory(graph, framework=in_place)["temporaries"] == eager


# --- published figures


def _one_tensor(parameters: int, strategy: Strategy) -> Graph:
    """All parameters in one block, as ZeRO's figures count them: fp16 gradients."""
    nothing = replace(toy_kind("embedding"), tensors=(), backward_workspace=0, saved=0, boundary=0)
    block = replace(nothing, name="block", tensors=(Tensor("w", 1000, parameters // 1000),))
    kinds = {"embedding": nothing, "block": block, "head": replace(nothing, name="head")}
    sizes = ElementSizes(parameter=2, gradient=2, state=12, master=True)
    return replace(toy_graph(strategy, blocks=1), kinds=kinds, sizes=sizes)


@pytest.mark.parametrize(("zero", "printed"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_figure_1(zero: int, printed: float) -> None:
    """arXiv 1910.02054, figure 1: 7.5 B parameters on 64 GPUs, mixed-precision Adam."""
    found = _memory(_one_tensor(7_500_000_000, Strategy(dp=64, zero=zero)))
    states = found["parameters"] + found["gradients"] + found["optimizer"]
    assert states / GB == pytest.approx(printed, abs=0.05)


def test_mixed_precision_takes_16_bytes_a_parameter() -> None:
    """2 + 2 + 12 (arXiv 1910.02054, section 3.1)."""
    model, training = find_model("llama-2-7b"), Training(sequence_length=512, global_batch=1)
    low = training.model_copy(update={"gradient_precision": "bf16"})
    found = _memory(build_graph(model, low, Strategy(dp=1)))
    states = found["parameters"] + found["gradients"] + found["optimizer"]
    assert states == 16 * model.parameter_count


def _gpt3(pp: int, **changes: object) -> Graph:
    given = {
        "sequence_length": 2048,
        "global_batch": 64,
        "precision": "fp16",
        "gradient_precision": "fp16",
        "attention": "materialised",
        "dropout": 0.1,
    }
    training = Training.model_validate(given | changes)
    return build_graph(find_model("gpt3-175b"), training, Strategy(dp=1, tp=8, pp=pp))


STATISTICS = 16 * 2048 / 8  # of the norms, bytes a layer and rank, which the paper leaves out
SBH = 2048 * 12288


def test_korthikanti_activations_of_gpt3() -> None:
    """arXiv 2205.05198, equation 4: s b h (34 + 5 a s / h) / t a layer, 5 a s / h = 80 for GPT-3.

    The first stage has p micro-batches of L / p layers: those of all L layers.
    """
    per_layer = SBH * (34 + 80) / 8 + STATISTICS
    for pp in (1, 2, 8):
        assert _memory(_gpt3(pp), kind="nvidia-smi")["activations"] == pytest.approx(
            FRAGMENTS["nvidia-smi"] * 96 * per_layer
        )


def test_korthikanti_interleaving_keeps_more() -> None:
    """The same, section 4.2.3: 1 + (p - 1) / (p m) times, m virtual stages."""
    one, three = (
        _memory(_gpt3(8), Execution(virtual_stages=v), kind="nvidia-smi")["activations"]
        for v in (1, 3)
    )
    assert three / one == pytest.approx(1 + 7 / (8 * 3))


def test_korthikanti_selective_recomputation_saves_70_percent() -> None:
    """The same, section 5: 80 of 114 s b h a layer for GPT-3."""
    run = Execution(recompute=Recompute.SELECTIVE)
    everything, some = (_memory(_gpt3(1), r)["activations"] for r in (USUAL, run))
    assert some == pytest.approx(96 * (SBH * 34 / 8 + STATISTICS))
    assert 1 - some / everything == pytest.approx(80 / 114, abs=0.001)


def test_full_recomputation_keeps_two_bytes_a_token_and_hidden_unit() -> None:
    run = Execution(recompute=Recompute.FULL)
    assert _memory(_gpt3(1), run)["activations"] == 96 * SBH * 2 / 8


def test_the_loss_of_a_whole_micro_batch_outweighs_a_layer() -> None:
    model = find_model("llama-3-8b")
    training = Training(sequence_length=8192, global_batch=8)
    whole, chunked = (
        _memory(build_graph(model, training, Strategy(dp=1), chunk))["temporaries"]
        for chunk in (None, 1024)
    )
    # Logits, their fp32 copy and the log-softmax: 10 bytes each.
    assert whole - chunked == pytest.approx((8192 - 1024) * model.vocab * 10, rel=0.2)


@pytest.mark.parametrize("framework", [MEGATRON, MEGATRON_DEEPSPEED, FSDP, DEEPSPEED])
def test_more_ways_never_need_more(framework: Framework) -> None:
    model, training = find_model("llama-2-13b"), Training(sequence_length=2048, global_batch=64)
    by_degree = [
        sum(
            _memory(
                build_graph(model, training, Strategy(dp=dp, zero=3)), USUAL, framework
            ).values()
        )
        for dp in (2, 4, 8, 16)
    ]
    assert by_degree == sorted(by_degree, reverse=True)


def test_shards_in_fp32_have_no_copy() -> None:
    graph = toy_graph(Strategy(dp=2, zero=3), blocks=4)
    masters = replace(BARE, shards_masters=True)
    assert _memory(graph, framework=masters) == _memory(graph) | {"parameters": 0.0}
    # Between a pipeline's micro-batches what was gathered stays.
    staged = toy_graph(Strategy(dp=2, pp=2, zero=3), blocks=4)
    assert _memory(staged, framework=masters) == _memory(staged)


def test_sums_over_zero_groups_stay_until_a_later_backward_ends() -> None:
    keeping = replace(BARE, keeps_sums=True)

    def more(zero_group: int, *, micro_batches: int = 2) -> float:
        strategy = Strategy(dp=4, zero=3, zero_group=zero_group)
        graph = toy_graph(strategy, blocks=4, units=micro_batches)
        return sum(_memory(graph, framework=keeping).values()) - sum(_memory(graph).values())

    own = 6 * EACH / 2  # elements of a rank
    kept = 4 * 64  # activations that are gone by then
    assert more(2) == 4 * own - kept
    assert more(0) == 0
    assert more(2, micro_batches=1) == 0  # the only micro-batch's sums are the step's
