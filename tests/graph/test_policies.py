"""What other frameworks run in a block, counted from their own rules."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigplan.cost.run import graph_of
from bigplan.graph.build import graph_of_shape
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.head import COMPILED_LOGIT_BYTES
from bigplan.graph.operators import Attention, Collective, Gemm, Operator, Stream
from bigplan.graph.policies import (
    Selective,
    compiling_loss,
    fusing_norms,
    gathering_for_adapters,
    gathering_logits,
    padding_products,
    selecting,
    summing_apart,
    turning_by_torch,
)
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.training import Training
from bigplan.validate.configure import run_of
from tests.validate.rows import row

TOKENS = 8192
LLAMA = find_model("llama-3-8b")


def _graphs(policy: Selective, model: str = "llama-3-8b", **changes: object) -> tuple[Graph, Graph]:
    given = {"sequence_length": TOKENS, "global_batch": 1} | changes
    shape = RankShape(find_model(model), Training.model_validate(given), Strategy(dp=1))
    graph = graph_of_shape(shape, None)
    return graph, selecting(graph, shape, policy)


def test_torchtitan_keeps_every_second_linear_layer() -> None:
    """Of q, k, v, o, w1, w3, w2 it keeps q, v, w1 and w2, beside input and attention's result."""
    _, graph = _graphs("operators")
    kept = graph.kinds["block"].kept(Recompute.SELECTIVE)
    h, kv, f = LLAMA.hidden, LLAMA.kv_heads * LLAMA.head_dim, LLAMA.ffn
    assert kept == TOKENS * (2 * (h + h + kv + h + f + h) + 4 * LLAMA.heads)
    again = graph.kinds["block"].again(Recompute.SELECTIVE)
    flops = sum(op.flops for op in again if isinstance(op, Gemm))
    assert flops == 2 * TOKENS * (h * kv + h * h + h * f)  # k, o and w3
    assert not any(isinstance(op, Attention) for op in again)
    names = {op.name for op in again if isinstance(op, Stream)}
    assert {"input norm", "post norm", "activation", "attention residual"} <= names
    assert "mlp residual" not in names  # no backward reads the output


def test_a_plain_mlp_ends_before_its_last_layer() -> None:
    """q, k, v, o, up, down: down would be the sixth, and no backward reads what it gives."""
    _, graph = _graphs("operators", "gpt2-xl")
    again = graph.kinds["block"].again(Recompute.SELECTIVE)
    assert [op.name for op in again if isinstance(op, Gemm)] == [
        "query, key, value",
        "attention output",
    ]


def test_megatron_runs_flash_attention_again_and_keeps_the_rest() -> None:
    plain, graph = _graphs("core")
    again = graph.kinds["block"].again(Recompute.SELECTIVE)
    assert [type(op) for op in again] == [Attention]
    assert graph.kinds["block"].kept(Recompute.SELECTIVE) == plain.kinds["block"].saved


@pytest.mark.parametrize("policy", ["cheap", "core", "operators"])
def test_everybody_runs_materialised_scores_again(policy: Selective) -> None:
    plain, graph = _graphs(policy, "gpt2-xl", attention="materialised")
    assert graph == plain


def test_a_published_run_has_its_frameworks_policy() -> None:
    columns = {"recompute": "selective", "gated_mlp": 1, "micro_batch": 1}
    titan, core = (
        graph_of(run_of(row(framework=name, **columns))).kinds["block"]
        for name in ("torchtitan", "Megatron-Core")
    )
    assert titan.kept(Recompute.SELECTIVE) < core.kept(Recompute.SELECTIVE) == core.saved


@pytest.mark.parametrize("attention", ["flash", "materialised"])
def test_jax_keeps_products_of_weights_alone(attention: str) -> None:
    """Queries, keys, values, attention's output and the MLP's hidden layer, beside the input."""
    _, graph = _graphs("dots", "gpt2-xl", attention=attention)
    block, hidden = graph.kinds["block"], find_model("gpt2-xl").hidden
    assert block.kept(Recompute.SELECTIVE) == 2 * TOKENS * hidden * (1 + 3 + 1 + 4)
    names = {op.name for op in block.again(Recompute.SELECTIVE)}
    core = {"attention"} if attention == "flash" else {"scores", "softmax", "weighted values"}
    assert names == core | {"input norm", "attention residual", "post norm", "activation"}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_products_apart_sum_their_inputs_gradient_each(sequence_parallel: bool) -> None:
    """With sequence parallelism the gradients are added before they are scattered."""
    training = Training.model_validate({"sequence_length": TOKENS, "global_batch": 1})
    strategy = Strategy(dp=1, tp=2, sequence_parallel=sequence_parallel)
    graph = graph_of_shape(RankShape(LLAMA, training, strategy), None)
    apart = summing_apart(graph, (3, 2)).kinds["block"]
    sums = {op.name: op for op in apart.backward if isinstance(op, Collective)}
    counts = (sums["attention input sum"].count, sums["mlp input sum"].count)
    assert counts == ((1, 1) if sequence_parallel else (3, 2))
    assert apart.forward == graph.kinds["block"].forward


@pytest.mark.parametrize(("sequence_parallel", "tp"), [(True, 2), (False, 2), (True, 1)])
def test_adapters_of_column_parallel_products_gather_for_themselves(
    sequence_parallel: bool, tp: int
) -> None:
    """What row-parallel ones read is a rank's own part; without sequence parallelism all is."""
    given = {"sequence_length": TOKENS, "global_batch": 1, "lora": {"rank": 8}}
    strategy = Strategy(dp=1, tp=tp, sequence_parallel=sequence_parallel)
    shape = RankShape(LLAMA, Training.model_validate(given), strategy)
    before, after = (
        one.kinds["block"]
        for graph in [graph_of_shape(shape, None)]
        for one in (graph, gathering_for_adapters(graph, shape))
    )
    ways = (after.forward, before.forward), (after.backward, before.backward)
    more = [[o for o in a if isinstance(o, Collective) and o not in b] for a, b in ways]
    if tp == 1 or not sequence_parallel:
        assert more == [[], []]
        return
    whole = TOKENS * LLAMA.hidden * 2
    found = [(o.pattern, o.nbytes, o.count) for each in more for o in each if o.exposed]
    assert found == [("all_gather", whole, 2), ("reduce_scatter", whole, 2)]


def test_whole_logits_are_gathered_and_lose_what_one_rank_would() -> None:
    """On 4 ranks each takes the loss that a rank alone takes, and gathers all logits."""
    training = Training.model_validate({"sequence_length": TOKENS, "global_batch": 1})
    alone = graph_of_shape(RankShape(LLAMA, training, Strategy(dp=1)), None)
    split = graph_of_shape(RankShape(LLAMA, training, Strategy(dp=1, tp=4)), None)
    whole = gathering_logits(split).kinds["head"]
    losses = {
        name: next(op for op in head.backward if isinstance(op, Stream) and op.name == "loss")
        for name, head in (("alone", alone.kinds["head"]), ("whole", whole))
    }
    assert losses["alone"].nbytes == losses["whole"].nbytes
    gathers = [op for op in whole.backward if isinstance(op, Collective) and op.name == "logits"]
    assert [op.nbytes for op in gathers] == [2 * TOKENS * LLAMA.vocab]
    logits = 12 * TOKENS * LLAMA.vocab
    assert whole.backward_workspace - split.kinds["head"].backward_workspace == logits * 3 // 4
    assert gathering_logits(alone) is alone


def test_a_compiler_pads_products_to_whole_loads() -> None:
    """GPT-2's 50,257 words become 50,264 in the head's three products, and nothing else changes."""
    _, graph = _graphs("cheap", "gpt2-xl")
    padded = padding_products(graph)
    head = [
        [one for one in (*kind.forward, *kind.backward) if isinstance(one, Gemm)]
        for kind in (graph.kinds["head"], padded.kinds["head"])
    ]
    assert {length for one in head[0] for length in (one.m, one.n, one.k)} >= {50257}
    assert {length % 8 for one in head[1] for length in (one.m, one.n, one.k)} == {0}
    assert {length for one in head[1] for length in (one.m, one.n, one.k)} >= {50264}
    assert padded.kinds["block"] == graph.kinds["block"]


def test_a_compiled_loss_moves_half_the_bytes_and_nothing_else_changes() -> None:
    """By its framework: plain torch, whose loss is compiled with the rest or eager."""
    _, graph = _graphs("cheap")
    compiled = compiling_loss(graph)
    before, after = (
        {op.name: op for op in one.kinds["head"].backward if not isinstance(op, Gemm)}
        for one in (graph, compiled)
    )
    loss = after.pop("loss")
    assert isinstance(loss, Stream)
    assert loss.nbytes == COMPILED_LOGIT_BYTES * TOKENS * LLAMA.vocab
    assert before.pop("loss") != loss
    assert before == after
    assert compiled.kinds["block"] == graph.kinds["block"]
    losses = [
        next(
            op
            for op in graph_of(run_of(row(compile=c))).kinds["head"].backward
            if op.name == "loss"
        )
        for c in (0, 1)
    ]
    assert isinstance(losses[0], Stream)
    assert isinstance(losses[1], Stream)
    assert losses[0].nbytes == 2 * losses[1].nbytes


def test_fused_norms_are_no_chains_forward_backward_and_again() -> None:
    plain, _ = _graphs("cheap")
    block, fused = plain.kinds["block"], fusing_norms(plain, LLAMA).kinds["block"]
    again = Recompute.SELECTIVE
    passes = (
        (block.forward, fused.forward),
        (block.backward, fused.backward),
        (block.again(again), fused.again(again)),
    )
    for before, after in passes:
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        assert {op.name for op in changed} == {"input norm", "post norm"}
        assert {op.eager for op in changed if isinstance(op, Stream)} == {1.0}


class _Passes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators read and write of tensors of a size, and those operators."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.moved = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = func(*args, **(kwargs or {}))
        views = func.is_view or func.name().startswith(("aten::split", "aten::detach"))
        if not views:
            tensors = [one for one in tree_leaves((args, given)) if isinstance(one, torch.Tensor)]
            self.moved += sum(one.numel() for one in tensors if 2 * one.numel() >= self.elements)
        return given

    @property
    def passes(self) -> float:
        return self.moved / self.elements


def test_positions_with_a_factor_take_as_many_passes_as_torch_makes() -> None:
    """Halves are turned by operators that keep what they read, then joined with no columns."""
    heads = torch.randn(16, 2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(16, 1, 1, 64)
    with _Passes(heads.numel()) as forward:
        turned, others = heads[..., :64], heads[..., 64:]
        cosine, sine = ((1.3 * f(angles)).to(heads.dtype) for f in (torch.cos, torch.sin))
        first, second = torch.chunk(turned, 2, dim=-1)
        summed = turned * cosine + torch.cat((-second, first), dim=-1) * sine
        result = torch.cat((summed, others), dim=-1)
    gradient = torch.ones_like(result)
    with _Passes(heads.numel()) as backward:
        result.backward(gradient)  # type: ignore[no-untyped-call]

    graph, _ = _graphs("cheap", "gpt-oss-20b")
    changed = turning_by_torch(graph, find_model("gpt-oss-20b"))
    for seen, plain, by_torch in (
        (forward, graph.kinds["block"].forward, changed.kinds["block"].forward),
        (backward, graph.kinds["block"].backward, changed.kinds["block"].backward),
    ):
        fused, chain = (_named(one, "rotary embedding").nbytes for one in (plain, by_torch))
        assert chain == seen.passes / 2 * fused


def test_positions_without_a_factor_are_turned_by_one_kernel() -> None:
    for name in ("llama-3-8b", "deepseek-v3"):
        graph, _ = _graphs("cheap", name)
        assert turning_by_torch(graph, find_model(name)) is graph


def _named(operators: tuple[Operator, ...], name: str) -> Stream:
    return next(one for one in operators if isinstance(one, Stream) and one.name == name)
