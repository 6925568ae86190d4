"""One block's operators and bytes, against the layers they are made of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bigplan.graph.activations import boundary_bytes, score_bytes
from bigplan.graph.block import block
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.operators import (
    Attention,
    Collective,
    Gemm,
    Operator,
    Stream,
    by_input_and_weight,
)
from bigplan.graph.shape import RankShape, local_tensor, new_gradients
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter
from bigplan.spec.training import Training
from tests.presets import one_of_each

LLAMA, GPT = find_model("llama-3-8b"), find_model("gpt3-175b")
LENGTH = 512
KERNELS = ["flash", "materialised"]


def _shape(
    model: ModelSpec = LLAMA,
    tp: int = 1,
    sequence_parallel: bool = True,
    micro_batch: int = 1,
    **training: object,
) -> RankShape:
    wanted = {"sequence_length": LENGTH, "global_batch": 4, **training}
    strategy = Strategy(dp=1, tp=tp, sequence_parallel=sequence_parallel, micro_batch=micro_batch)
    return RankShape(model, Training.model_validate(wanted), strategy)


def _block(model: ModelSpec = LLAMA, tp: int = 1, **training: object) -> LayerKind:
    return block(_shape(model, tp, **training))  # type: ignore[arg-type]


def _named(operators: tuple[Operator, ...], name: str) -> Operator:
    (found,) = (op for op in operators if op.name == name)
    return found


def _gemm(operators: tuple[Operator, ...], name: str) -> Gemm:
    found = _named(operators, name)
    assert isinstance(found, Gemm)
    return found


def _stream(operators: tuple[Operator, ...], name: str) -> Stream:
    found = _named(operators, name)
    assert isinstance(found, Stream)
    return found


def _collectives(operators: tuple[Operator, ...]) -> list[Collective]:
    return [op for op in operators if isinstance(op, Collective)]


def _ring_bytes(operators: tuple[Operator, ...]) -> int:
    """Bytes that exposed collectives move: an all-reduce scatters the sums, then gathers them."""
    return sum(
        op.count * op.nbytes * (2 if op.pattern == "all_reduce" else 1)
        for op in _collectives(operators)
        if not op.hidden
    )


# --- tensor and sequence parallelism


def test_one_rank_talks_to_nobody() -> None:
    kind = _block()
    assert _collectives(kind.forward + kind.backward) == []


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sequence_parallelism_moves_the_bytes_of_an_all_reduce(tp: int) -> None:
    split, whole = (block(_shape(LLAMA, tp, sp)) for sp in (True, False))
    state = LENGTH * LLAMA.hidden * 2
    for a, b in ((split.forward, whole.forward), (split.backward, whole.backward)):
        # Attention and MLP, an all-reduce each: it moves a hidden state twice.
        assert _ring_bytes(a) == _ring_bytes(b) == 2 * 2 * state
        assert {op.pattern for op in _collectives(b)} == {"all_reduce"}
        assert {op.pattern for op in _collectives(a)} == {"all_gather", "reduce_scatter"}


def test_weight_gradients_gather_their_inputs_again_beside_a_product() -> None:
    hidden = [op for op in _collectives(_block(tp=4).backward) if op.hidden]
    assert [op.name for op in hidden] == [
        "attention input again gather",
        "mlp input again gather",
    ]
    assert not [op for op in _collectives(_block(tp=4).forward) if op.hidden]
    alone = block(_shape(LLAMA, 4, sequence_parallel=False))
    assert not [op for op in _collectives(alone.backward) if op.hidden]


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt3-175b"])
def test_sequence_parallelism_splits_what_tensor_parallelism_repeats(name: str) -> None:
    model = find_model(name)
    split, whole = (block(_shape(model, 4, sp)) for sp in (True, False))
    assert split.boundary * 4 == whole.boundary == boundary_bytes(model, LENGTH, 2)
    # Both residual streams and both normed inputs, with the norms' statistics: 1 or 2 of 4 bytes.
    statistics = 2 * LENGTH * 4 * (2 if model.norm == "layernorm" else 1)
    repeated = 4 * boundary_bytes(model, LENGTH, 2) + statistics
    assert whole.saved - split.saved == repeated * 3 // 4
    for stream in ("input norm", "post norm", "attention residual", "mlp residual"):
        assert _stream(split.forward, stream).nbytes * 4 == _stream(whole.forward, stream).nbytes


def test_without_sequence_parallelism_norms_are_repeated() -> None:
    one, four = (block(_shape(LLAMA, tp, sequence_parallel=False)) for tp in (1, 4))
    for name in ("input norm", "post norm"):
        assert _stream(four.forward, name).nbytes == _stream(one.forward, name).nbytes
    assert (
        _stream(four.forward, "activation").nbytes * 4 == _stream(one.forward, "activation").nbytes
    )


@pytest.mark.parametrize(
    ("split", "rows", "columns"), [("rows", 4, 6), ("columns", 10, 2), ("replicated", 10, 6)]
)
def test_local_tensors_round_up(split: str, rows: int, columns: int) -> None:
    parameter = Parameter("w", (10, 6), split, True)  # type: ignore[arg-type]
    found = local_tensor(parameter, 3)
    assert (found.rows, found.columns) == (rows, columns)


def test_few_key_value_heads_are_repeated_and_lie_before_what_all_ranks_have() -> None:
    few = LLAMA.model_copy(update={"kv_heads": 2})
    kind = _block(few, tp=8)
    names = {t.name for t in kind.tensors if t.holders == 4}
    assert names == {"k_proj.weight", "v_proj.weight"}
    heads = range(2 * LLAMA.head_dim * LLAMA.hidden)
    norms = range(2 * LLAMA.hidden)
    end = kind.parameters
    assert kind.repeated == (
        (4, range(end - len(norms) - len(heads), end - len(norms))),
        (8, range(end - len(norms), end)),
    )
    assert _block(few).repeated == ()


# --- products


def test_grouped_queries_share_keys_and_values() -> None:
    kind = _block()
    assert (LLAMA.heads, LLAMA.kv_heads, LLAMA.head_dim) == (32, 8, 128)
    found = _gemm(kind.forward, "query, key, value")
    assert (found.m, found.n, found.k) == (LENGTH, 4096 + 2 * 1024, 4096)
    kernel = _named(kind.forward, "attention")
    assert isinstance(kernel, Attention)
    # Queries and outputs of 32 heads, keys and values of 8, in 2 bytes.
    assert kernel.nbytes == LENGTH * (2 * 32 + 2 * 8) * 128 * 2
    # Eight heads over 16 ranks: each rank keeps a copy of one.
    assert _gemm(_block(tp=16).forward, "query, key, value").n == (2 + 2) * 128


def test_a_gated_mlp_is_one_product_of_twice_the_width() -> None:
    assert _gemm(_block(LLAMA).forward, "mlp up").n == 2 * LLAMA.ffn
    assert _gemm(_block(GPT).forward, "mlp up").n == GPT.ffn
    assert _gemm(_block(GPT, tp=8).forward, "mlp down").k == GPT.ffn // 8


def test_backward_multiplies_by_the_input_and_by_the_weight() -> None:
    by_input, by_weight = by_input_and_weight((Gemm("w", 5, 7, 11, count=3),))
    assert (by_input.m, by_input.n, by_input.k) == (5, 11, 7)  # [m, n] x [n, k]
    assert (by_weight.m, by_weight.n, by_weight.k) == (7, 11, 5)  # [n, m] x [m, k]
    assert by_input.flops == by_weight.flops == 3 * 2 * 5 * 7 * 11


@pytest.mark.parametrize("tp", [1, 2])
def test_products_with_odd_rows_stand_beside_the_others(tp: int) -> None:
    """30 rates and 30 decays would slow all columns of one product that gave them, too."""
    model = find_model("olmo-hybrid-7b")
    model = model.seen_by("delta_rule")
    (step,) = (step for step in model.steps("block") if step.name == "delta_rule input")
    kind = _block(model, tp)
    given = [op for op in kind.forward if op.name == step.name and isinstance(op, Gemm)]
    narrow, wide = given
    assert (narrow.n, narrow.count) == (30 // tp, 2)
    assert wide.n % 8 == 0
    assert narrow.n * narrow.count + wide.n == sum(one.columns(tp) for one in step.gives)
    back = [op for op in kind.backward if op.name.startswith(f"{step.name} by")]
    assert sum(op.flops for op in back if isinstance(op, Gemm)) == 2 * sum(op.flops for op in given)
    shared = _block(find_model("qwen1.5-moe-a2.7b")).forward
    assert sorted(op.n for op in shared if op.name == "shared up" and isinstance(op, Gemm))[0] == 1


def test_only_rotary_models_rotate_and_only_biased_ones_add() -> None:
    llama, gpt = _block(LLAMA), _block(GPT)
    assert [op.name for op in llama.forward].count("rotary embedding") == 1
    assert "rotary embedding" not in {op.name for op in gpt.forward}
    biases = [op.name for op in gpt.backward if op.name.endswith("bias")]
    assert len(biases) == 4
    assert not [op for op in llama.backward if op.name.endswith("bias")]


def test_a_gradient_is_read_and_written_where_it_is_summed() -> None:
    kind = _block()
    found = _stream(kind.backward, "gradient sum")
    assert found.nbytes == 2 * 4 * kind.parameters
    # Apart from the GEMM, the product is read too, in 2 bytes: 10 for 8.
    assert found.nbytes * found.eager == pytest.approx((2 * 4 + 2) * kind.parameters)


@pytest.mark.parametrize(("gradients", "nbytes"), [("fp32", 2 * 4), ("bf16", 2 * 2 + 2)])
def test_native_products_add_to_no_sum_of_16_bits(gradients: str, nbytes: int) -> None:
    """There the gradient is a tensor, which the workspace holds and the addition reads."""
    shape = replace(_shape(gradient_precision=gradients), fused=True)
    kind = block(shape)
    assert _stream(kind.backward, "gradient sum").nbytes == nbytes * kind.parameters
    assert (new_gradients(shape, kind.tensors) >= 2 * kind.parameters) == (gradients == "bf16")


# --- attention


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_materialised_scores_are_two_products_and_a_softmax(micro_batch: int) -> None:
    kind = block(_shape(GPT, 8, micro_batch=micro_batch, attention="materialised"))
    heads = GPT.heads // 8
    scores, values = _gemm(kind.forward, "scores"), _gemm(kind.forward, "weighted values")
    assert (scores.m, scores.n, scores.k) == (LENGTH, LENGTH, GPT.head_dim)
    assert (values.m, values.n, values.k) == (LENGTH, GPT.head_dim, LENGTH)
    assert scores.batch == values.batch == micro_batch * heads
    square = micro_batch * heads * LENGTH**2 * 2
    # Of the square of scores a causal softmax reads half and writes all.
    softmax, back = (_stream(way, "softmax") for way in (kind.forward, kind.backward))
    assert (softmax.nbytes, back.nbytes) == (1.5 * square, 2 * square)
    # As plain torch kernels mask and softmax are two each way: four and five passes.
    assert softmax.nbytes * softmax.eager == pytest.approx(4 * square)
    assert back.nbytes * back.eager == pytest.approx(5 * square)
    assert not [op for op in kind.forward if isinstance(op, Attention)]


def test_flash_attention_computes_the_triangle_and_recomputes_it_backward() -> None:
    flash, plain = (_block(attention=kernel) for kernel in KERNELS)
    forward, backward = _named(flash.forward, "attention"), _named(flash.backward, "attention")
    assert isinstance(forward, Attention)
    assert isinstance(backward, Attention)
    square = _gemm(plain.forward, "scores").flops + _gemm(plain.forward, "weighted values").flops
    assert forward.flops == square / 2
    assert backward.flops == 2.5 * forward.flops
    assert backward.backward
    assert forward.length == LENGTH


def test_a_sliding_window_bounds_attention() -> None:
    """Of the triangle's 1/2 a window of a quarter leaves 1/4 - 1/32."""
    window = LENGTH // 4
    windowed = LLAMA.model_copy(update={"sliding_window": window})
    for one, other in ((_block(windowed), _block(LLAMA)), (_fused(windowed), _fused(LLAMA))):
        for found, whole in zip(
            (*one.forward, *one.backward), (*other.forward, *other.backward), strict=True
        ):
            if isinstance(found, Attention):
                assert isinstance(whole, Attention)
                assert found.flops == whole.flops * 7 / 16
                assert (found.length, found.window) == (LENGTH, window)
                assert found.nbytes == whole.nbytes
            else:
                assert found == whole
        assert one.saved == other.saved
        assert one.backward_workspace == other.backward_workspace


@pytest.mark.parametrize("fewer", [1, 4])
def test_heads_that_share_keys_and_values_take_more(fewer: int) -> None:
    """Their gradients are written for every head of queries first, in 16 bits alone."""
    narrow = LLAMA.model_copy(update={"ffn": 64, "kv_heads": LLAMA.heads // fewer})
    sixteen, more = (
        block(replace(_shape(narrow, precision=precision), fused=True)).backward_workspace
        for precision in ("bf16", "fp32")
    )
    width = LENGTH * LLAMA.heads * LLAMA.head_dim  # elements
    scores = 4 * LENGTH * LLAMA.heads  # bytes of a number for each row of them
    every = 4 * width + 4 * width // fewer + 4 * width + scores
    assert sixteen == every + (fewer > 1) * 4 * width
    assert more == (4 + 1) * 4 * width + 2 * scores


@pytest.mark.parametrize(
    ("precision", "batch", "length", "heads", "kv_heads", "width", "deterministic", "mib"),
    [
        ("bf16", 4, 4096, 32, 8, 128, False, 834.0),
        ("bf16", 1, 32768, 32, 8, 128, False, 1668.0),
        ("bf16", 1, 32768, 32, 32, 128, False, 1540.0),
        ("bf16", 1, 32768, 32, 8, 64, False, 836.0),
        ("bf16", 1, 4096, 16, 8, 96, False, 84.25),
        ("bf16", 1, 4096, 16, 1, 80, False, 65.5),
        ("bf16", 1, 4096, 16, 1, 80, True, 257.5),
        ("bf16", 1, 4096, 32, 8, 128, True, 464.5),
        ("bf16", 4, 4096, 32, 8, 128, True, 1090.0),
        ("bf16", 1, 32768, 32, 8, 128, True, 3716.0),
        ("fp32", 1, 4096, 32, 8, 128, False, 321.0),
        ("fp32", 4, 4096, 32, 8, 128, False, 1284.0),
        ("fp32", 1, 4096, 16, 16, 64, False, 80.5),
    ],
)
def test_attention_s_backward_takes_what_an_h100_took(
    precision: str,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    width: int,
    deterministic: bool,
    mib: float,
) -> None:
    """MiB in benchmarks/results/2026-11-25-h100-memory/attention.txt.

    FlashAttention-2 took as much within a window as cuDNN did without; cuDNN 61.5 for heads of 80.
    """
    sizes = {"hidden": 64, "ffn": 64, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
    model = LLAMA.model_copy(update=sizes)
    shape = _shape(
        model,
        micro_batch=batch,
        sequence_length=length,
        precision=precision,
        deterministic=deterministic,
    )
    found = block(replace(shape, fused=True, multiprocessors=132)).backward_workspace
    assert found / 2**20 == pytest.approx(mib, abs=0.05)


@pytest.mark.parametrize(("micro_batch", "sums"), [(1, 5), (2, 3), (4, 2), (5, 1)])
def test_deterministic_attention_adds_up_in_as_many_sums_as_fill_the_gpu(
    micro_batch: int, sums: int
) -> None:
    """Of 132 multiprocessors; a block of 32 heads a sequence has one each."""
    narrow = LLAMA.model_copy(update={"ffn": 64})
    same, any_ = (
        block(
            replace(
                _shape(narrow, micro_batch=micro_batch, deterministic=wanted),
                fused=True,
                multiprocessors=132,
            )
        ).backward_workspace
        for wanted in (True, False)
    )
    elements = micro_batch * LENGTH * LLAMA.heads * LLAMA.head_dim
    assert same - any_ == (sums - 1) * 4 * elements


@pytest.mark.parametrize("window", [LENGTH, 2 * LENGTH])
def test_a_window_that_hides_nothing_changes_nothing(window: int) -> None:
    windowed = LLAMA.model_copy(update={"sliding_window": window})
    assert _block(windowed) == _block(LLAMA)
    assert _fused(windowed) == _fused(LLAMA)


def _fused(model: ModelSpec) -> LayerKind:
    return block(replace(_shape(model), fused=True))


def test_dropout_writes_masks() -> None:
    for kernel in KERNELS:
        dry, wet = (_block(GPT, attention=kernel, dropout=p) for p in (0.0, 0.1))
        assert wet.saved > dry.saved
        state = LENGTH * GPT.hidden  # a byte each: the masks of both residuals
        more = 2 * state
        if kernel == "materialised":  # and of the scores, with what they let through
            more += GPT.heads * LENGTH**2 * (1 + 2)
        assert wet.saved - dry.saved == more
        assert _stream(wet.forward, "mlp residual").nbytes == (
            _stream(dry.forward, "mlp residual").nbytes + state
        )


ALIBI = LLAMA.model_copy(update={"positions": "alibi", "kv_heads": 32})


def _by_torch(shape: RankShape) -> RankShape:
    return replace(shape, training=shape.training.model_copy(update={"kernels": "torch"}))


@pytest.mark.parametrize("changes", [{"kernels": "torch"}, {"precision": "fp32"}])
def test_linear_biases_take_wider_heads_where_they_have_no_kernel(
    changes: dict[str, object],
) -> None:
    """Natively: of 128 columns and eight more, in whole groups of 64, and copies of all heads."""
    shape = _shape(ALIBI)
    shape = replace(shape, training=shape.training.model_copy(update=changes))
    plain, wide = block(shape), block(replace(shape, fused=True))
    for one, other in ((plain.forward, wide.forward), (plain.backward, wide.backward)):
        kernel, slower = _named(one, "attention"), _named(other, "attention")
        assert isinstance(kernel, Attention)
        assert isinstance(slower, Attention)
        assert slower.flops == kernel.flops * 192 / 128
        assert (kernel.kernel, slower.kernel) == (None, "flash2")
    tensor = LENGTH * 32 * (128 + 8) * shape.element
    assert _stream(wide.forward, "linear biases").nbytes == 3 * 2 * 4 * tensor
    assert _stream(wide.backward, "linear biases").nbytes == 3 * 2 * 8 * tensor
    # What is saved is no wider.
    assert wide.saved == plain.saved


@pytest.mark.parametrize(("width", "columns"), [(128, 128), (80, 128), (64, 64), (8, 16)])
def test_a_kernel_of_linear_biases_has_heads_as_they_are(width: int, columns: int) -> None:
    """In tiles of a power of two; nothing is copied, and its backward has a number a row."""
    model = ALIBI.model_copy(update={"head_dim": width})
    shape = _shape(model)
    plain, ours = block(shape), block(replace(shape, fused=True))
    for one, other in ((plain.forward, ours.forward), (plain.backward, ours.backward)):
        kernel, biased = _named(one, "attention"), _named(other, "attention")
        assert isinstance(kernel, Attention)
        assert isinstance(biased, Attention)
        assert biased.flops == kernel.flops * columns / width
        assert (biased.kernel, biased.nbytes, biased.head_dim) == ("alibi", kernel.nbytes, columns)
        assert not [op for op in other if op.name == "linear biases"]
    assert ours.saved == plain.saved
    torch = block(_by_torch(replace(shape, fused=True)))
    assert ours.forward_workspace < torch.forward_workspace
    assert ours.backward_workspace <= torch.backward_workspace


@pytest.mark.parametrize("parallel", [False, True])
def test_a_parallel_residual_leaves_both_last_products_out(parallel: bool) -> None:
    model = LLAMA.model_copy(update={"parallel_residual": parallel})
    kind = block(_shape(model, 2))
    left_out = {op.name for op in kind.forward} - set(_again(kind, Recompute.FULL))
    mlp = {"mlp down", "mlp residual", "mlp output sum"}
    attention = {"attention output", "attention residual", "attention output sum"}
    assert left_out == (mlp | attention if parallel else mlp)
    # Both norms save the block's input, and nobody what is between.
    other = block(_shape(model.model_copy(update={"parallel_residual": False}), 2))
    assert other.saved - kind.saved == (kind.boundary if parallel else 0)


# --- fp8


@pytest.mark.parametrize("attention", KERNELS)
def test_only_fp8_products_are_cast(attention: str) -> None:
    plain, low = (_block(attention=attention, fp8_gemms=fp8) for fp8 in (False, True))
    everything = plain.forward + plain.backward
    assert not [op for op in everything if op.name.endswith("to fp8")]
    assert not [op for op in everything if isinstance(op, Gemm) and op.fp8]
    linear = {op.name for op in low.forward if isinstance(op, Gemm) and op.fp8}
    # Materialised scores stay in 16 bits, as Transformer Engine has them.
    assert linear == {"query, key, value", "attention output", "mlp up", "mlp down"}
    casts = {op.name for op in low.forward if op.name.endswith("to fp8")}
    assert casts == {f"{name} to fp8" for name in linear}
    for name in linear:
        gemm = _gemm(low.forward, name)
        # Both operands read in 2 bytes, written in 1, and transposed in 1 more.
        assert _stream(low.forward, f"{name} to fp8").nbytes == 4 * (
            gemm.m * gemm.k + gemm.k * gemm.n
        )
        assert _stream(low.backward, f"{name} to fp8").nbytes == 4 * gemm.m * gemm.n


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_the_native_runtime_looks_for_the_largest_value_first(gradients: str) -> None:
    """2 bytes for it, 2 for the cast, 1 written for each form that a product reads."""
    shape = replace(_shape(fp8_gemms=True, gradient_precision=gradients), fused=True)
    low = block(shape)
    for name in ("query, key, value", "attention output", "mlp up", "mlp down"):
        gemm, ahead = _gemm(low.forward, name), _stream(low.forward, f"{name} to fp8")
        factors = gemm.m * gemm.k + gemm.k * gemm.n
        assert ahead.nbytes == 5 * factors
        back = _stream(low.backward, f"{name} to fp8")
        # What a product would have added to its sum is made apart, in 16 bits, and read again.
        apart = 2 * gemm.k * gemm.n if gradients == "fp32" else 0
        assert back.nbytes == 5 * factors + 6 * gemm.m * gemm.n + apart
        assert back.launches > ahead.launches
        assert ahead.in_turn
        assert back.in_turn


def test_other_tools_that_add_in_products_cast_once() -> None:
    shape = replace(_shape(fp8_gemms=True), fused=True, cast_once=True)
    tools, plain = block(shape), block(replace(shape, training=_shape().training))
    gemm = _gemm(tools.forward, "mlp up")
    ahead, back = (_stream(each, "mlp up to fp8") for each in (tools.forward, tools.backward))
    assert ahead.nbytes == 4 * (gemm.m * gemm.k + gemm.k * gemm.n)
    assert back.nbytes == 4 * gemm.m * gemm.n
    assert tools.backward_workspace == plain.backward_workspace


def test_casts_have_room() -> None:
    """Beside all that a block has in 16 bits: the widest product decides."""
    plain, low = (block(replace(_shape(fp8_gemms=on), fused=True)) for on in (False, True))
    tokens, hidden, ffn = LENGTH, LLAMA.hidden, LLAMA.ffn
    assert low.saved == plain.saved
    assert low.forward_workspace - plain.forward_workspace == ffn * (tokens + hidden)
    given, matrix = tokens * 3 * ffn, 2 * ffn * hidden  # of gate and up, and one as it is
    assert low.backward_workspace - plain.backward_workspace == given + tokens * hidden + matrix


# --- recomputation


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("name", one_of_each())
@pytest.mark.parametrize("tp", [1, 2])
def test_more_is_run_again_the_less_is_kept(name: str, attention: str, tp: int) -> None:
    model = find_model(name)
    length = min(LENGTH, model.max_sequence_length)
    kind = _block(model, tp, attention=attention, sequence_length=length)
    kept = [kind.kept(recompute) for recompute in Recompute]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[1] >= kept[2] > kept[3]
    again = [kind.again(recompute) for recompute in Recompute]
    for less, more in pairwise(again):
        assert set(less) <= set(more) < set(kind.forward)


def _again(kind: LayerKind, recompute: Recompute) -> list[str]:
    return [op.name for op in kind.again(recompute)]


def _spared(kind: LayerKind, recompute: Recompute) -> int:
    return kind.saved - kind.kept(recompute)


def test_selective_runs_again_what_is_large_beside_its_work() -> None:
    flash, plain = (_block(attention=kernel) for kernel in KERNELS)
    # Flash attention has no large scores: the norms and the activation are run again instead.
    assert _again(flash, Recompute.SELECTIVE) == ["input norm", "post norm", "activation"]
    normed, inner = boundary_bytes(LLAMA, LENGTH, 2), LENGTH * LLAMA.ffn * 2
    assert _spared(flash, Recompute.SELECTIVE) == 2 * normed + inner
    # Korthikanti et al. 2022: the scores, their softmax and the values it weighs.
    assert _again(plain, Recompute.SELECTIVE) == ["scores", "softmax", "weighted values"]
    shape = _shape(attention="materialised").activation_shape
    assert _spared(plain, Recompute.SELECTIVE) == score_bytes(LLAMA, shape) > 0


def test_of_the_mlp_only_its_input_is_kept() -> None:
    kind = _block()
    assert set(_again(kind, Recompute.MLP)) - set(_again(kind, Recompute.SELECTIVE)) == {"mlp up"}
    inputs = 2 * LENGTH * LLAMA.ffn * 2  # gate and up
    assert kind.kept(Recompute.SELECTIVE) - kind.kept(Recompute.MLP) == inputs
    relu = _block(find_model("opt-13b"), sequence_length=2048)
    # ReLU's output, which is kept, is all that its derivative needs.
    assert kind_ways(relu, Recompute.MLP) == kind_ways(relu, Recompute.SELECTIVE)


def kind_ways(kind: LayerKind, recompute: Recompute) -> tuple[int, list[str]]:
    """What is kept, and what runs again."""
    return kind.kept(recompute), _again(kind, recompute)


def test_full_recomputation_ends_before_the_last_product() -> None:
    """Nothing in a block's backward reads the block's output."""
    kind = _block()
    left_out = {op.name for op in kind.forward} - set(_again(kind, Recompute.FULL))
    assert left_out == {"mlp down", "mlp residual"}


def test_recomputation_needs_the_memory_it_spared_for_one_layer() -> None:
    kind = _block()
    plain = kind.workspace(Recompute.NONE)
    for recompute in (Recompute.SELECTIVE, Recompute.MLP):
        assert kind.workspace(recompute) - plain == _spared(kind, recompute)
    assert kind.workspace(Recompute.FULL) - plain == kind.saved


# --- context parallelism


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize(("cp", "tp", "heads"), [(2, 1, 4), (8, 1, 1), (4, 4, 1)])
def test_context_parallel_ranks_exchange_what_attention_reads_and_gives(
    cp: int, tp: int, heads: int, micro_batch: int
) -> None:
    """llama-3-8b: 32 heads of queries, 8 of keys, 128 wide; `heads`: of keys, on a rank."""
    training = Training(sequence_length=LENGTH, global_batch=4)
    strategy = Strategy(dp=1, cp=cp, tp=tp, micro_batch=micro_batch)
    found = block(RankShape(LLAMA, training, strategy))
    whole = micro_batch * LENGTH * 128 * 2  # bytes of a head
    queries, keys = whole * 32 // (tp * cp), whole * heads
    for operators in (found.forward, found.backward, found.reruns[Recompute.FULL].operators):
        sent = {
            op.name: op.nbytes
            for op in operators
            if isinstance(op, Collective) and op.pattern == "all_to_all"
        }
        assert sent == {
            "queries exchange": queries,
            "keys exchange": keys,
            "values exchange": keys,
            "attention's values exchange": queries,
        }
        copies = [op for op in operators if op.name.endswith("in parts")]
        moved = 2 * (2 * queries + 2 * keys) * (1 if micro_batch == 1 else 2)
        assert sum(op.nbytes for op in copies if isinstance(op, Stream)) == moved
    for policy in (Recompute.SELECTIVE, Recompute.MLP):
        again = found.reruns[policy].operators
        assert not any(isinstance(op, Collective) and op.pattern == "all_to_all" for op in again)


@pytest.mark.parametrize("tp", [1, 2])
def test_context_parallel_ranks_share_out_tokens_and_all_of_attention(tp: int) -> None:
    whole = _shape(GPT, tp)
    half = replace(whole, strategy=whole.strategy.model_copy(update={"cp": 2}))
    assert half.tokens * 2 == whole.tokens
    one, two = block(whole), block(half)
    assert two.boundary * 2 == one.boundary
    # Attention saves what it gives, and the product what comes back: that is one value more.
    assert 2 * (two.saved - half.whole_hidden // tp) == one.saved
    kernels = [_named(found.forward, "attention") for found in (one, two)]
    assert isinstance(kernels[0], Attention)
    assert isinstance(kernels[1], Attention)
    assert kernels[1].flops * 2 == kernels[0].flops
    assert kernels[1].length == kernels[0].length == LENGTH
    assert sum(t.elements for t in two.tensors) == sum(t.elements for t in one.tensors)


def test_context_parallelism_splits_the_tokens() -> None:
    whole = _shape(GPT)
    half = RankShape(GPT, whole.training, whole.strategy, context_parallel=2)
    assert half.tokens * 2 == whole.tokens
    assert block(half).boundary * 2 == block(whole).boundary
    assert block(half).saved * 2 == block(whole).saved
    assert _gemm(block(half).forward, "mlp up").m * 2 == LENGTH
