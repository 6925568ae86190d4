"""Blocks that are frozen, with adapters."""

from __future__ import annotations

import pytest

from bigplan.graph.build import build_graph, model_flops
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.operators import Attention, Collective, Gemm, Operator, Stream
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.lora import Lora, trained_count
from bigplan.spec.training import Training

LLAMA = find_model("llama-3-8b")
TOKENS = 4096
Operators = tuple[Operator, ...]


def _graph(lora: Lora | None, **strategy: int) -> Graph:
    training = Training(sequence_length=TOKENS, global_batch=8, lora=lora)
    return build_graph(LLAMA, training, Strategy(dp=1, **strategy), fused=True)


def _flops(operators: Operators) -> float:
    return sum(op.flops for op in operators if isinstance(op, Gemm | Attention))


def _products(operators: Operators) -> float:
    return sum(op.flops for op in operators if isinstance(op, Gemm))


@pytest.mark.parametrize("rank", [4, 16])
def test_products_have_two_flops_a_frozen_weight_each_way(rank: int) -> None:
    """Adapters have 2 forward and 6 backward, of which x A^T is made again."""
    kind, lora = _graph(Lora(rank=rank)).kinds["block"], Lora(rank=rank)
    weights = sum(t.elements for t in kind.tensors if t.rows > 1)
    small = trained_count(LLAMA, lora) // LLAMA.layers
    downs = sum(t.elements for t in kind.adapters if t.name.endswith("lora_A"))
    assert _products(kind.forward) == 2 * TOKENS * (weights + small)
    assert _products(kind.backward) == TOKENS * (2 * weights + 4 * small + 2 * downs)


def test_the_flops_of_a_step_are_those_of_its_graph() -> None:
    """Without x A^T, which is made again, and half a triangle of attention's backward."""
    lora = Lora(rank=16)
    training = Training(sequence_length=TOKENS, global_batch=8, lora=lora)
    graph = build_graph(LLAMA, training, Strategy(dp=1), fused=True)
    every = sum(
        graph.micro_batches * _products((*kind.forward, *kind.backward))
        for kind in (graph.kinds[name] for name in graph.layers)
    )
    downs = sum(t.elements for t in graph.kinds["block"].adapters if t.name.endswith("lora_A"))
    again = 2 * training.tokens_per_step * downs * LLAMA.layers
    row = 6.0 * TOKENS * LLAMA.heads * LLAMA.head_dim * LLAMA.layers
    assert every - again == pytest.approx(
        model_flops(LLAMA, training) - training.tokens_per_step * row
    )


def test_dropout_passes_over_each_targets_input_and_keeps_nothing() -> None:
    """Forward it reads and writes; backward once more, and reads two gradients and writes one."""
    plain, drops = (_graph(Lora(rank=8, dropout=p)).kinds["block"] for p in (0.0, 0.1))
    inputs = TOKENS * 2 * (6 * LLAMA.hidden + LLAMA.ffn)
    for way, passes in (("forward", 2), ("backward", 5)):
        before, after = (
            [op for op in getattr(kind, way) if "adapters" in op.name] for kind in (plain, drops)
        )
        assert _products(tuple(after)) == _products(tuple(before))
        moved = [sum(op.nbytes for op in ops if isinstance(op, Stream)) for ops in (before, after)]
        # Without it the backward reads the gradient by an input once for all that read it.
        once = TOKENS * 2 * (3 * LLAMA.hidden + LLAMA.ffn) if way == "backward" else 0
        assert moved[1] - moved[0] == passes * inputs - once
    assert drops.saved == plain.saved
    copy = TOKENS * LLAMA.ffn * 2
    assert drops.forward_workspace == plain.forward_workspace + copy
    assert drops.backward_workspace == plain.backward_workspace + copy


def test_frozen_layers_keep_less() -> None:
    whole, adapted = (_graph(lora).kinds["block"] for lora in (None, Lora(rank=8)))
    some = _graph(Lora(rank=8, targets=("q_proj",))).kinds["block"]
    hidden, inner = TOKENS * LLAMA.hidden * 2, TOKENS * LLAMA.ffn * 2
    assert adapted.saved == whole.saved
    assert some.saved == whole.saved - hidden - inner  # inputs of the MLP up and down
    # The norm before attention runs again; nothing else that is cheap would be kept.
    assert some.kept(Recompute.SELECTIVE) == some.saved - hidden
    assert [op.name for op in some.again(Recompute.SELECTIVE)] == ["input norm"]
    assert some.kept(Recompute.FULL) == whole.kept(Recompute.FULL)
    for kind in (whole, adapted, some):
        assert kind.kept(Recompute.MLP) < kind.kept(Recompute.SELECTIVE)


def test_recomputed_in_full_the_last_product_and_its_adapters_do_not_run_again() -> None:
    names = [op.name for op in _graph(Lora(rank=8)).kinds["block"].again(Recompute.FULL)]
    assert "mlp up adapters B" in names
    assert not [name for name in names if name.startswith("mlp down")]


def test_ends_of_the_model_have_no_gradients_of_their_own() -> None:
    kinds = _graph(Lora(rank=8)).kinds
    assert kinds["embedding"].backward == ()
    assert kinds["embedding"].idle_backward
    names = [op.name for op in kinds["head"].backward]
    assert "lm head by input" in names
    assert "lm head by weight" not in names
    assert "gradient sum" not in names
    plain = _graph(None).kinds["head"]
    assert kinds["head"].backward_workspace <= plain.backward_workspace


def test_a_stage_has_its_adapters_in_one_piece_with_shared_ones_last() -> None:
    graph = _graph(Lora(rank=8), tp=16, pp=2)
    adapters = graph.adapters(graph.stage_layers(0))
    holders = [tensor.holders for _, tensor in adapters.tensors]
    assert holders == sorted(holders)
    assert adapters.elements == sum(tensor.elements for _, tensor in adapters.tensors)
    assert [number for number, _ in adapters.repeated] == [2, 16]
    last = adapters.repeated[-1][1]
    assert last.stop == adapters.elements
    assert len(last) == sum(t.elements for _, t in adapters.tensors if t.holders == 16)
    assert {layer for layer, _ in adapters.tensors} == set(range(1, 17))


def test_sequence_parallel_ranks_gather_again_for_adapters_alone() -> None:
    def gathered(targets: tuple[str, ...]) -> list[str]:
        backward = _graph(Lora(rank=8, targets=targets), tp=2).kinds["block"].backward
        return [op.name for op in backward if isinstance(op, Collective) and "again" in op.name]

    assert gathered(("q_proj",)) == ["attention input again gather"]
    assert gathered(("o_proj", "down_proj")) == []
