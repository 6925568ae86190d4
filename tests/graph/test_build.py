from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest

from bigplan.graph.build import build_graph, element_sizes, model_flops
from bigplan.graph.graph import Graph, LayerKind
from bigplan.graph.operators import Attention, Collective, Gemm, Operator, Stream
from bigplan.graph.strategy import Strategy
from bigplan.spec.carried import inputs_width
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from tests.presets import one_of_each

TRAINING = Training(sequence_length=512, global_batch=8)
WINDOWED = [name for name in list_models() if find_model(name).sliding_window]


def _elements(graph: Graph) -> int:
    return sum(graph.kinds[kind].parameters for kind in graph.layers)


def _flops(operators: tuple[Operator, ...]) -> float:
    """Of products and attention; those that add experts' biases are no useful work."""
    useful = (op for op in operators if not op.name.startswith("biases of"))
    return sum(op.flops for op in useful if isinstance(op, Gemm | Attention))


def _moved(kind: LayerKind, name: str) -> float:
    return sum(op.nbytes for op in kind.backward if isinstance(op, Stream) and op.name == name)


@pytest.mark.parametrize("name", list_models())
def test_every_parameter_is_in_one_tensor(name: str) -> None:
    model = find_model(name)
    graph = build_graph(model, TRAINING, Strategy(dp=1))
    constants = [p.count - p.values for kind in model.layer_sequence() for p in model.kinds()[kind]]
    assert _elements(graph) == model.parameter_count + sum(constants)
    assert graph.tied == model.tied_embeddings == graph.kinds["embedding"].pinned


@pytest.mark.parametrize("name", list_models())
def test_no_matrix_begins_askew_behind_a_vector(name: str) -> None:
    """Else torch multiplies by kernels with narrow loads. GPT-2's table has an odd size itself."""
    for kind in build_graph(find_model(name), TRAINING, Strategy(dp=1)).kinds.values():
        ends = accumulate(tensor.elements for tensor in kind.tensors)
        for tensor, end in zip(kind.tensors, ends, strict=True):
            if tensor.rows > 1 and tensor.elements % 8 == 0:
                assert (end - tensor.elements) % 8 == 0, tensor.name


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_splits_matrices_and_repeats_norms(tp: int) -> None:
    model = find_model("llama-3-8b")
    whole, split = (
        build_graph(model, TRAINING, Strategy(dp=1, tp=t)).kinds["block"] for t in (1, tp)
    )
    norms = 2 * model.hidden
    assert (split.parameters - norms) * tp == whole.parameters - norms
    assert _flops(split.forward) * tp == pytest.approx(_flops(whole.forward))
    # Attention and MLP gather their input and scatter their sums, forward and backward, and with
    # sequence parallelism (the default) gather their inputs once more: 4 + 4 + 2.
    exposed = [op for op in split.forward + split.backward if isinstance(op, Collective)]
    assert len(exposed) == 10
    assert sum(op.hidden for op in exposed) == 2
    assert not any(isinstance(op, Collective) for op in whole.forward + whole.backward)


# What attention does beside useful work, in forwards of its triangle: flash attention's backward
# does 2.5 forwards, not 2; materialised scores are squares, so all three passes are done twice.
NOT_USEFUL = {"flash": 0.5, "materialised": 3.0}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in list_models()
        if {one.window for one in find_model(name).attentions} - {None}
    ],
)
@pytest.mark.parametrize("times", [1, 2, 8])
def test_operators_within_a_window_do_the_useful_work(times: int, name: str) -> None:
    """Of a sequence of so many windows, with the sum over tokens of min(position, window)."""
    model = find_model(name)
    window = model.sliding_window
    assert window is not None
    length = times * window
    training = Training(sequence_length=length, global_batch=4)
    graph = build_graph(model, training, Strategy(dp=1), loss_chunk=None)
    # The backward makes scores again, and what the embedding adds to blocks' inputs.
    again = 2.0 * length * inputs_width(model) * model.hidden
    for kind, blocks in Counter(model.block_kinds).items():
        attention = [op for op in graph.kinds[kind].forward if isinstance(op, Attention)]
        seen_model = model.seen_by(kind)
        expected = []
        for one, part in seen_model.attention_shares.items():
            within = min(one.window or length, length)
            whole = sum(min(position, within) for position in range(1, length + 1))
            seen = whole - within / 2  # the diagonal counts as half
            expected.append(part * 4 * seen * seen_model.heads * seen_model.head_dim)
        if times == 1:  # no window hides a token, so all blocks are alike
            expected = [sum(expected)]
        assert [kernel.flops for kernel in attention] == pytest.approx(expected, rel=1e-12)
        again += sum(expected) / 2 * blocks
    done = sum(
        _flops(graph.kinds[kind].forward) + _flops(graph.kinds[kind].backward)
        for kind in graph.layers
    )
    useful = model_flops(model, training) / training.global_batch
    assert done - again == pytest.approx(useful, rel=1e-12)


def _of_chunks(kind: LayerKind) -> float:
    """FLOPs of a mixer's own products, of its chunks of tokens."""
    names = ("delta rule's", "state space's")
    both = (*kind.forward, *kind.backward)
    return sum(op.flops for op in both if isinstance(op, Gemm) and op.name.startswith(names))


@pytest.mark.parametrize("attention", NOT_USEFUL)
@pytest.mark.parametrize("name", one_of_each())
def test_operators_do_the_useful_work_of_the_model(name: str, attention: str) -> None:
    """Forward and backward of all layers are model_flops and what attention wastes."""
    model = find_model(name)
    length = min(512, model.max_sequence_length, model.sliding_window or 512)
    training = Training.model_validate(
        {"sequence_length": length, "global_batch": 4, "attention": attention}
    )
    graph = build_graph(model, training, Strategy(dp=1))
    done = sum(
        _flops(graph.kinds[kind].forward) + _flops(graph.kinds[kind].backward)
        for kind in graph.layers
    )
    beside = model.attention_beside is not None
    seen = [model.seen_by(kind) for kind in model.block_kinds]
    attending = [
        one for one, m in zip(seen, model.mixers, strict=True) if beside or m == "attention"
    ]
    triangle = 2.0 * length * length * sum(one.heads * one.head_dim for one in attending)
    useful = model_flops(model, training) / training.global_batch
    wasted = NOT_USEFUL[attention] * triangle
    wasted += 2.0 * length * inputs_width(model) * model.hidden  # which the backward makes again
    if model.latent_attention is not None:
        # Values are narrower. Materialised, squares of both are done twice. In flash attention
        # values are padded to keys: seven columns of keys for three of keys and three of values.
        keys, values = model.head_dim, model.value_width
        columns = {"flash": 4 * keys - 3 * values, "materialised": 3 * (keys + values)}
        wasted = triangle / (2 * keys) * columns[attention]
    # What chunks take: tests/runtime/mixers/test_delta_rule.py and test_state_space.py.
    if (rule := model.delta_rule) is not None:
        recurrence = 18.0 * length * rule.value_heads * rule.key_dim * rule.value_dim
        wasted += (_of_chunks(graph.kinds["delta_rule"]) - recurrence) * model.mixers.count(
            "delta_rule"
        )
    if (space := model.state_space) is not None:
        recurrence = 12.0 * length * space.width * space.state
        chunks = _of_chunks(graph.kinds["block" if beside else "state_space"])
        wasted += (chunks - recurrence) * model.mixers.count("state_space")
    assert done - wasted == pytest.approx(useful, rel=1e-12)


@pytest.mark.parametrize(("chunk", "chunks"), [(None, 1), (1024, 1), (512, 1), (200, 3), (128, 4)])
def test_the_loss_takes_so_many_tokens_at_a_time(chunk: int | None, chunks: int) -> None:
    model = find_model("llama-3-8b")
    whole, cut = (
        build_graph(model, TRAINING, Strategy(dp=1), c).kinds["head"] for c in (512, chunk)
    )
    (gemm,) = (op for op in cut.backward if isinstance(op, Gemm) and op.name == "lm head")
    assert gemm.count == chunks
    assert gemm.m == min(512, chunk or 512)
    # Chunks keep fewer logits, and add to the table's gradient once each.
    assert (cut.backward_workspace < whole.backward_workspace) == (chunks > 1)
    sums = [_moved(kind, "gradient sum") for kind in (whole, cut)]
    assert sums[1] == chunks * sums[0]


def test_the_vocabulary_is_split_over_tensor_parallel_ranks() -> None:
    model = find_model("llama-3-8b")
    head = build_graph(model, TRAINING, Strategy(dp=1, tp=8)).kinds["head"]
    (gemm,) = (op for op in head.backward if isinstance(op, Gemm) and op.name == "lm head")
    assert gemm.n == model.vocab // 8


def test_flops_of_a_step_follow_six_n_d() -> None:
    model = find_model("gpt3-175b")
    training = Training(sequence_length=2048, global_batch=1)
    # The rule of thumb leaves attention out (2-3% here) and counts embeddings (0.4%).
    assert model_flops(model, training) == pytest.approx(6 * 175e9 * 2048, rel=0.05)


def test_a_tied_table_is_the_first_layers_on_any_number_of_stages() -> None:
    model = find_model("gpt2-xl")
    assert model.tied_embeddings
    alone, apart = (build_graph(model, TRAINING, Strategy(dp=1, pp=pp)) for pp in (1, 2))
    assert alone.kinds["head"].tensors == apart.kinds["head"].tensors
    assert _elements(apart) == _elements(alone) == model.parameter_count
    assert alone.tied
    assert apart.kinds["embedding"].pinned
    assert (alone.lends_table, apart.lends_table) == (False, True)


@pytest.mark.parametrize(
    ("precision", "gradient", "sizes"),
    [("bf16", "fp32", (2, 4, 12)), ("bf16", "bf16", (2, 2, 12)), ("fp32", "fp32", (4, 4, 8))],
)
def test_bytes_per_element(precision: str, gradient: str, sizes: tuple[int, int, int]) -> None:
    training = Training.model_validate(
        TRAINING.model_dump() | {"precision": precision, "gradient_precision": gradient}
    )
    found = element_sizes(training)
    assert (found.parameter, found.gradient, found.state) == sizes
    assert found.master == (precision == "bf16")


def test_micro_batches_scale_what_is_per_token() -> None:
    model = find_model("llama-3-8b")
    one, two = (build_graph(model, TRAINING, Strategy(dp=1, micro_batch=m)) for m in (1, 2))
    assert (one.micro_batches, two.micro_batches) == (8, 4)
    for name in one.kinds:
        assert two.kinds[name].saved == 2 * one.kinds[name].saved
        assert two.kinds[name].boundary == 2 * one.kinds[name].boundary
        assert two.kinds[name].parameters == one.kinds[name].parameters
        assert one.kinds[name].forward_workspace >= 0
        assert one.kinds[name].backward_workspace > 0


def test_clipping_is_the_trainings() -> None:
    model: ModelSpec = find_model("tiny-llama-test")
    free = Training(sequence_length=64, global_batch=2, clip_norm=None)
    assert build_graph(model, TRAINING, Strategy(dp=1)).deferred
    assert not build_graph(model, free, Strategy(dp=1)).deferred


def test_the_native_runtime_has_no_gradient_of_the_whole_table() -> None:
    """A small GPU need not hold 128,256 words a second time, whatever the micro-batch."""
    model = find_model("llama-3-8b")
    by_rows, dense = (
        build_graph(model, TRAINING, Strategy(dp=1, micro_batch=8), fused=fused).kinds["embedding"]
        for fused in (True, False)
    )
    table = 2 * model.vocab * model.hidden
    assert dense.backward_workspace == dense.largest == table
    # A copy, ones and zeros, sums; tokens and where they were, sorted, and the sort's own.
    rows = 2048 * (model.hidden * (2 + 4) + 2 * 2048)
    assert by_rows.backward_workspace == rows + 4 * 8 * 8 * 512
    assert _moved(by_rows, "gradient sum") == 2 * table < _moved(dense, "gradient sum")


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl"])
def test_looked_up_rows_are_priced_by_tokens(name: str) -> None:
    model = find_model(name)
    tables = 1 + (model.positions == "learned")
    few, many = (
        build_graph(model, TRAINING, Strategy(dp=1, micro_batch=n), fused=True).kinds["embedding"]
        for n in (1, 8)
    )
    assert _moved(many, "look-up") == 8 * _moved(few, "look-up")
    # Of a bf16 gradient of 512 tokens a sorted copy is made, and its sums in fp32 are added to
    # those of the table.
    assert _moved(few, "look-up") == tables * 512 * model.hidden * (4 + 4 + 8)


def test_few_rows_of_a_large_table_are_looked_up_where_it_is() -> None:
    model = find_model("llama-3-8b")

    def looked_up(model: ModelSpec, strategy: Strategy) -> int:
        return build_graph(model, TRAINING, strategy).kinds["embedding"].looked_up

    assert looked_up(model, Strategy(dp=1, micro_batch=2)) == 2 * 512 * model.hidden
    few_words = _like(model, vocab=1023)  # two entries would be no smaller
    assert looked_up(few_words, Strategy(dp=1)) == 0
    assert looked_up(model, Strategy(dp=2)) == looked_up(model, Strategy(dp=1, tp=2)) == 0
    assert looked_up(model, Strategy(dp=1, pp=2)) == 0
    tied = _like(model, tied_embeddings=True)
    assert looked_up(tied, Strategy(dp=1)) == 0


def _like(model: ModelSpec, **changes: object) -> ModelSpec:
    return ModelSpec.model_validate(model.model_dump() | changes)


def test_an_embedding_with_a_norm_keeps_what_it_looked_up() -> None:
    bloom = find_model("bloom-176b")
    plain = bloom.model_copy(update={"embedding_norm": False})
    for strategy in (Strategy(dp=1), Strategy(dp=1, tp=4)):
        normed, other = (
            build_graph(model, TRAINING, strategy, fused=True).kinds["embedding"]
            for model in (bloom, plain)
        )
        # In 16 bits, with two fp32 statistics a token: a rank's part of it.
        kept = 512 * (2 * bloom.hidden + 8) // strategy.tp
        assert normed.saved - other.saved == kept
        assert {op.name for op in normed.forward} - {op.name for op in other.forward} == {
            "embedding norm"
        }


def test_an_embedding_with_a_norm_is_never_looked_up_in_host_memory() -> None:
    untied = find_model("bloom-176b").model_copy(update={"tied_embeddings": False})
    plain = untied.model_copy(update={"embedding_norm": False})
    found = [
        build_graph(m, TRAINING, Strategy(dp=1)).kinds["embedding"].looked_up
        for m in (untied, plain)
    ]
    assert found[0] == 0 < found[1]
