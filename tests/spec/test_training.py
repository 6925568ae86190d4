import pytest

from bigplan.errors import InputError
from bigplan.spec.catalog import find_model
from bigplan.spec.files.document import parse_document
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training, TrainingRequest, resolve


def request(text: str) -> TrainingRequest:
    return parse_document(text, TrainingRequest, "t.yaml")


def test_defaults() -> None:
    training = resolve(TrainingRequest(), find_model("llama-3-8b"))
    assert training == Training(sequence_length=8192, global_batch=512)
    assert training.tokens_per_step == 4 * 2**20
    assert (training.compute_bytes, training.gradient_bytes, training.clip_norm) == (2, 4, 1.0)
    assert training.optimizer == Optimizer(
        learning_rate=3e-4, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1
    )


def test_default_length_is_the_models_and_the_batch_follows() -> None:
    assert resolve(TrainingRequest(), find_model("gpt2-xl")).sequence_length == 1024
    long = resolve(request("sequence_length: 8388608"), find_model("llama-3-8b"))
    assert long.global_batch == 1


def test_null_turns_clipping_off_and_is_the_default_elsewhere() -> None:
    model = find_model("llama-3-8b")
    assert resolve(request("clip_norm: null"), model).clip_norm is None
    assert resolve(request("seed: null\nprecision: null"), model) == resolve(
        TrainingRequest(), model
    )


def test_given_values_win() -> None:
    text = "{precision: fp32, steps: 3, optimizer: {learning_rate: 1e-4}, data: a.txt, seed: 7}"
    training = resolve(request(text), find_model("tiny-llama-test"))
    assert (training.precision, training.steps, training.data, training.seed) == (
        "fp32",
        3,
        "a.txt",
        7,
    )
    assert training.optimizer == Optimizer(learning_rate=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precision: fp8", "t.yaml:1: `precision` is 'fp8', which must be one of bf16, fp16, fp32"),
        ("attention: eager", "`attention` is 'eager', which must be one of flash, materialised"),
        ("dropout: 1.0", "`dropout` is 1.0, which must be less than 1"),
        ("fp8_gemms: 1", "`fp8_gemms` is 1, which must be true or false"),
        ("lora: {rank: 8, lora_dropout: 0.1}", "did you mean 'dropout'?"),
        ("lora: {rank: 8, dropout: 1}", "`lora.dropout` is 1, which must be less than 1"),
        ("lora_rank: 8", "`lora_rank`: adapters other than those of `training.lora`"),
        (
            "context_parallel: 2",
            "`context_parallel`: context parallelism is a decision, cp; leave it out",
        ),
        ("optimizer: {name: lion}", "`optimizer.name` is 'lion', which must be one of adamw, sgd"),
        ("global_batch: 0", "must be greater than 0"),
        ("sequence_len: 3", "did you mean 'sequence_length'?"),
        ("clip_norm: -1", "must be greater than 0"),
        ("optimizer: {beta1: 1.0}", "must be less than 1"),
    ],
)
def test_bad_requests(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        request(text)
    assert message in str(caught.value)


def test_learned_positions_end() -> None:
    with pytest.raises(InputError, match="2048 is longer than the 1024 positions"):
        resolve(request("sequence_length: 2048"), find_model("gpt2-xl"))


def test_options_of_the_arithmetic() -> None:
    text = """
        precision: fp16
        gradient_precision: fp16
        reduce_precision: fp32
        fp8_gemms: true
        attention: materialised
        dropout: 0.1
    """
    training = resolve(request(text), find_model("tiny-llama-test"))
    assert (training.compute_bytes, training.gradient_bytes, training.reduce_precision) == (
        2,
        2,
        "fp32",
    )
    assert (training.fp8_gemms, training.attention, training.dropout) == (True, "materialised", 0.1)
    plain = resolve(TrainingRequest(), find_model("tiny-llama-test"))
    assert (plain.fp8_gemms, plain.attention, plain.dropout) == (False, "flash", 0.0)
    assert plain.reduce_precision is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "precision: fp32\ngradient_precision: bf16",
            "gradient_precision bf16 does not go with precision fp32; "
            "use gradient_precision: fp32, or precision: bf16",
        ),
        (
            "precision: fp16\nreduce_precision: bf16",
            "reduce_precision bf16 does not go with precision fp16; "
            "use reduce_precision: fp32 or reduce_precision: fp16, or precision: bf16",
        ),
        ("precision: fp32\nfp8_gemms: true", "fp8_gemms needs a 16-bit precision around"),
        ("document_tokens: 100", "document_tokens 100 says how long documents are that are kept"),
    ],
)
def test_values_that_do_not_go_together(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(request(text), find_model("tiny-llama-test"))
    assert message in str(caught.value)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_gradients_may_be_as_coarse_as_compute(precision: str) -> None:
    text = f"{{precision: {precision}, gradient_precision: {precision}}}"
    assert resolve(request(text), find_model("tiny-llama-test")).gradient_precision == precision


def test_tokens_a_step_in_place_of_sequences() -> None:
    model = find_model("llama-3-8b")
    asked = request("sequence_length: 4096\ntokens_per_step: 64 k\ntokens: 1 T\n")
    with pytest.raises(InputError, match=r"no multiple of sequence_length 4096.* such as 65536"):
        resolve(asked, model)
    asked = request("sequence_length: 4096\ntokens_per_step: 65536\ntokens: 1e12\n")
    training = resolve(asked, model)
    assert (training.global_batch, training.tokens) == (16, 10**12)
    both = request("sequence_length: 4096\ntokens_per_step: 65536\nglobal_batch: 16\n")
    with pytest.raises(InputError, match="leave one out"):
        resolve(both, model)
