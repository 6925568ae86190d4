"""What the native runtime executes, and the words for what it does not."""

from __future__ import annotations

import pytest

from bigplan.capabilities.native import device_refusal, executable, native_refusal
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.gpu import find_gpu
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from tests.wording import tells

DATA_PARALLEL = Strategy(dp=2)
TRAINING = Training(sequence_length=64, global_batch=4)
GPU = find_gpu("h100-sxm-80gb")


def _training(**changes: object) -> Training:
    return Training.model_validate(TRAINING.model_dump() | changes)


def _model(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(find_model("tiny-llama-test").model_dump() | changes)


def test_llama_blocks_and_data_parallelism_are_executed() -> None:
    model = _model(tied_embeddings=True, qk_norm=True, qkv_bias=True)
    assert native_refusal(model, TRAINING, DATA_PARALLEL) is None
    assert executable(model, TRAINING, DATA_PARALLEL, GPU)["native"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "layernorm", "mlp": "gelu_tanh", "positions": "learned", "mlp_bias": True},
        {"norm": "layernorm", "norm_bias": False, "mlp": "gelu"},
        {"mlp": "relu", "positions": "learned", "position_offset": 2},
        {"rope_scaling": {"name": "linear", "factor": 2.0}},
        {"positions": "alibi", "embedding_norm": True},
        {"rotary_fraction": 0.25, "parallel_residual": True},
        {"sliding_window": 32},
        {"sliding_window": 1, "positions": "alibi"},
    ],
)
def test_other_blocks_are_executed(changes: dict[str, object]) -> None:
    assert native_refusal(_model(**changes), TRAINING, DATA_PARALLEL) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_scaling": {"name": "dynamic"}},
            "linear, llama3, yarn, longrope and proportional only, not dyn",
        ),
    ],
)
def test_other_architectures_are_named(changes: dict[str, object], words: str) -> None:
    model = _model(**changes)
    assert words in (native_refusal(model, TRAINING, DATA_PARALLEL) or "")
    assert words in str(executable(model, TRAINING, DATA_PARALLEL, GPU)["native"])


def test_queries_that_grow_know_no_documents() -> None:
    """Within the length of the pre-training none grows."""
    model = find_model("ministral-3-8b")
    for length, refused in ((16384, False), (16385, True)):
        changes = {"sequence_length": length, "isolate_documents": True}
        why = native_refusal(model, TRAINING.model_copy(update=changes), DATA_PARALLEL)
        assert ("rope_scaling.query_growth" in (why or "")) == refused


def test_places_that_llama_4_knows() -> None:
    """Whole chunks, and no documents where queries grow."""
    model = find_model("llama-4-scout")
    cases = [
        ({"sequence_length": 8000, "isolate_documents": True}, ""),
        ({"sequence_length": 16384}, ""),
        ({"sequence_length": 16383}, "no multiple of attention_chunk 8192 of llama-4-scout"),
        ({"sequence_length": 8192, "isolate_documents": True}, "with global_query_growth"),
    ]
    for changes, words in cases:
        why = native_refusal(model, TRAINING.model_copy(update=changes), DATA_PARALLEL)
        assert bool(why) == bool(words)
        assert words in (why or "")


@pytest.mark.parametrize("strategy", [Strategy(dp=1, tp=2), Strategy(dp=2, tp=4, pp=2, zero=3)])
def test_tensor_parallelism_is_executed_where_ranks_have_equally_many_tokens(
    strategy: Strategy,
) -> None:
    assert native_refusal(_model(), TRAINING, strategy) is None
    odd = _training(sequence_length=63)
    words = f"63 do not divide by tp {strategy.tp}"
    assert words in (native_refusal(_model(), odd, strategy) or "")
    whole = strategy.model_copy(update={"sequence_parallel": False})
    assert native_refusal(_model(), odd, whole) is None


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_zero_stage_is_executed(zero: int) -> None:
    assert native_refusal(_model(), TRAINING, Strategy(dp=2, zero=zero)) is None


@pytest.mark.parametrize("strategy", [Strategy(dp=2, pp=2, zero=3), Strategy(dp=1, pp=2, vpp=2)])
def test_pipelines_are_executed(strategy: Strategy) -> None:
    for tied in (False, True):
        assert native_refusal(_model(tied_embeddings=tied), TRAINING, strategy) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dropout": 0.1}, "does not execute dropout 0.1: use dropout 0.0"),
        (
            {"attention": "materialised", "dropout": 0.1},
            "attention materialised, dropout 0.1: use attention flash, dropout 0.0",
        ),
        ({"reduce_precision": "bf16"}, "in fp32, not in bf16: leave reduce_precision out"),
    ],
)
def test_other_arithmetic_is_named(changes: dict[str, object], words: str) -> None:
    training = _training(**changes)
    assert words in (native_refusal(_model(), training, DATA_PARALLEL) or "")
    assert words in str(executable(_model(), training, DATA_PARALLEL, GPU)["native"])


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32"},
        {"precision": "fp16", "gradient_precision": "fp16"},
        {"optimizer": {"name": "sgd"}},
        {"gradient_precision": "bf16"},
        {"gradient_precision": "bf16", "reduce_precision": "bf16"},
        {"reduce_precision": "fp32"},
    ],
)
def test_arithmetic_of_the_native_runtime(changes: dict[str, object]) -> None:
    assert native_refusal(_model(), _training(**changes), DATA_PARALLEL) is None


def test_nothing_runs_on_a_device_that_no_engine_has_run_on() -> None:
    amd = find_gpu("mi300x")
    told = executable(_model(), TRAINING, DATA_PARALLEL, amd)["native"]
    assert told == device_refusal(amd)
    assert tells(str(told), "ROCm", "MI300X")
    assert device_refusal(GPU) is None
