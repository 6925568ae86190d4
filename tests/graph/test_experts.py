"""What a block's experts compute, keep and need on one rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from bigplan.graph.activations import block_saved_bytes, saved_values
from bigplan.graph.block import block
from bigplan.graph.experts import gradient_bytes
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.operators import Collective, Gemm, Operator, Stream
from bigplan.graph.shape import RankShape, local_tensors
from bigplan.graph.spread import ranks_reached
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.gpu import find_gpu
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

MIXTRAL, QWEN = find_model("mixtral-8x7b"), find_model("qwen3-30b-a3b")
LENGTH = 4096
TRAINING = Training(sequence_length=LENGTH, global_batch=1)


def shape(model: ModelSpec = MIXTRAL, gpu: str = "h100-sxm-80gb", tp: int = 1) -> RankShape:
    return RankShape.on(find_gpu(gpu), model, TRAINING, Strategy(dp=1, tp=tp))


def named(operators: tuple[Operator, ...], name: str) -> Operator:
    (found,) = (one for one in operators if one.name == name)
    return found


def gemm(kind: LayerKind, name: str) -> Gemm:
    found = named((*kind.forward, *kind.backward), name)
    assert isinstance(found, Gemm)
    return found


@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_product_has_the_flops_of_the_experts_that_tokens_pass(model: ModelSpec, tp: int) -> None:
    kind = block(shape(model, tp=tp))
    matrix = 2 * LENGTH * model.experts_per_token * model.hidden * model.ffn // tp
    for after in ("", " by input", " by weight"):
        up, down = gemm(kind, f"mlp up{after}"), gemm(kind, f"mlp down{after}")
        assert (up.flops, down.flops) == (2 * matrix, matrix)
        assert gemm(kind, f"router{after}").flops == 2 * LENGTH * model.hidden * model.experts


def test_all_experts_matrices_are_read_and_all_gradients_written() -> None:
    kind, rows = block(shape()), LENGTH * 2
    inputs, outputs = rows * MIXTRAL.hidden, rows * MIXTRAL.ffn
    matrices = 8 * MIXTRAL.hidden * MIXTRAL.ffn
    for name in ("mlp down", "mlp down by input", "mlp down by weight"):
        assert gemm(kind, name).elements == inputs + outputs + matrices
    assert gemm(kind, "mlp up").elements == 2 * gemm(kind, "mlp down").elements


def test_kept_bytes_do_not_hold_rows_or_what_other_experts_would_make() -> None:
    size = shape().activation_shape
    kept = {value.name: nbytes for value, nbytes in saved_values(MIXTRAL, size).items()}
    rows = 2 * LENGTH
    assert kept["mlp input"] == 2 * LENGTH * MIXTRAL.hidden
    assert kept["gate"] == kept["up"] == kept["inner"] == 2 * rows * MIXTRAL.ffn
    assert kept["router scores"] == 2 * LENGTH * 8
    assert kept["router weights"] == kept["chosen experts"] == kept["order of rows"] == 4 * rows
    assert not {"sent", "returned"} & set(kept)


def test_every_rank_keeps_all_choices_under_sequence_parallelism() -> None:
    one, four = (saved_values(MIXTRAL, shape(tp=tp).activation_shape) for tp in (1, 4))
    for value, nbytes in one.items():
        whole = value.whole or value.name.startswith(("chosen", "order"))
        assert four[value] == (nbytes if whole else nbytes // 4), value.name


def test_what_runs_again_brings_rows_to_experts_first() -> None:
    kind = block(shape())
    again = {way: [one.name for one in kind.again(way)] for way in Recompute}
    assert again[Recompute.SELECTIVE] == ["input norm", "post norm"]
    assert again[Recompute.MLP][-2:] == ["sent", "mlp up"]
    assert {"route", "sent", "router", "mlp up"} <= set(again[Recompute.FULL])
    assert not {"mlp down", "combine", "activation"} & set(again[Recompute.FULL])
    saved = block_saved_bytes(MIXTRAL, shape().activation_shape)
    inner = 2 * 2 * LENGTH * MIXTRAL.ffn
    normed = 2 * LENGTH * MIXTRAL.hidden
    assert kind.kept(Recompute.SELECTIVE) == saved - inner - 2 * normed
    assert kind.kept(Recompute.MLP) == saved - 3 * inner - 2 * normed


def test_gradients_of_one_projection_live_at_once() -> None:
    """A grouped product makes them in bf16, to be added to fp32 sums."""
    sizes, projection = shape(), 2 * 8 * MIXTRAL.hidden * MIXTRAL.ffn
    tensors = local_tensors(sizes, "block")
    assert gradient_bytes(sizes, tensors) == projection
    narrow = TRAINING.model_copy(update={"gradient_precision": "bf16"})
    assert gradient_bytes(replace(sizes, training=narrow), tensors) == 3 * projection
    assert block(sizes).backward_workspace > projection
    added = named(block(sizes).backward, "gradient sum")
    assert isinstance(added, Stream)
    everything = sum(tensor.elements for tensor in tensors)
    assert added.nbytes == 8 * everything + 3 * projection


@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
@pytest.mark.parametrize("tp", [1, 4])
def test_experts_in_fp8_are_cast_by_row_and_by_column(model: ModelSpec, tp: int) -> None:
    """3 bytes an element by row, 5 by column, 6.6 of rows for them; each as products read it."""
    plain = shape(model, tp=tp)
    low = replace(plain, training=TRAINING.model_copy(update={"fp8_gemms": True}))
    sixteen, eight = block(plain), block(low)
    rows, width = LENGTH * model.experts_per_token, model.ffn // tp
    hidden, inner = rows * model.hidden, rows * width
    matrix = model.experts * model.hidden * width
    bytes_of = {
        "up": (
            3 * LENGTH * model.hidden + 2 * 3 * matrix,
            2 * (5 * matrix + 9.6 * inner) + 6.6 * hidden,
        ),
        "down": (3 * inner + 5 * matrix, 3 * matrix + 9.6 * hidden + 6.6 * inner),
    }
    for name, (ahead, back) in bytes_of.items():
        for after in ("", " by input", " by weight"):
            assert gemm(eight, f"mlp {name}{after}").fp8
            assert gemm(eight, f"mlp {name}{after}").launches == (2 if name == "up" else 1)
        for operators, nbytes in ((eight.forward, ahead), (eight.backward, back)):
            cast = named(operators, f"mlp {name} to fp8")
            assert isinstance(cast, Stream)
            assert cast.nbytes == pytest.approx(nbytes)
    # Copies of tokens have half the bytes, on their way there.
    sent = [named(one.forward, "sent") for one in (sixteen, eight)]
    assert [stream.nbytes for stream in sent if isinstance(stream, Stream)] == [
        4 * hidden,
        2 * hidden,
    ]
    assert not gemm(eight, "router").fp8
    assert gemm(eight, "query, key, value").fp8
    assert eight.saved == sixteen.saved
    assert eight.backward_workspace - sixteen.backward_workspace >= matrix
    assert [op.name for op in eight.again(Recompute.MLP)][-2:] == ["mlp up", "mlp up to fp8"]


def test_without_a_grouped_kernel_each_expert_is_a_launch_that_waits() -> None:
    grouped, apart = (block(shape(gpu=gpu)) for gpu in ("h100-sxm-80gb", "a100-sxm4-80gb"))
    assert gemm(grouped, "mlp up").launches == 2
    assert gemm(apart, "mlp up").launches == 16
    assert (grouped.waits, apart.waits) == (False, True)
    wide = TRAINING.model_copy(update={"precision": "fp32"})
    assert block(replace(shape(), training=wide)).waits  # torch has the kernel in bf16 alone
    odd = MIXTRAL.model_copy(update={"ffn": 14332})
    assert block(shape(odd)).waits  # rows of 28,664 bytes, which are not whole loads of 16
    assert not block(shape(find_model("llama-3-8b"), gpu="a100-sxm4-80gb")).waits


@pytest.mark.parametrize(("tokens", "long"), [(9_360, False), (9_368, True)])
def test_long_products_of_experts_are_launches_of_their_own_beside_the_host(
    tokens: int, *, long: bool
) -> None:
    """From 2^38 FLOPs: 2,341 rows an expert of Mixtral's, 2 of 8 for each of 9,363 tokens."""
    one = replace(shape(), training=Training(sequence_length=tokens, global_batch=2))
    kind = block(one)
    assert (kind.waits, kind.in_turn) == (long, False)
    assert gemm(kind, "mlp up").launches == (16 if long else 2)
    # Which add to fp32 sums themselves.
    matrix = 8 * MIXTRAL.hidden * MIXTRAL.ffn
    assert gradient_bytes(one, kind.tensors) == (0 if long else 2 * matrix)
    assert not block(replace(one, strategy=Strategy(dp=2, ep=2))).waits  # rows vary there
    assert block(shape(gpu="a100-sxm4-80gb")).in_turn


def test_collectives_are_those_of_a_dense_block() -> None:
    dense = find_model("mistral-7b").model_copy(update={"sliding_window": None})

    def collectives(model: ModelSpec) -> list[Collective]:
        kind = block(shape(model, tp=4))
        return [c for c in (*kind.forward, *kind.backward) if isinstance(c, Collective)]

    assert collectives(MIXTRAL) == collectives(dense)
    # The router is one more tensor whose gradients ranks sum.
    held = block(shape(tp=4)).repeated
    assert sum(len(part) for _, part in held) == 2 * MIXTRAL.hidden + 8 * MIXTRAL.hidden


def spread_shape(ep: int, model: ModelSpec = MIXTRAL) -> RankShape:
    return RankShape.on(find_gpu("h100-sxm-80gb"), model, TRAINING, Strategy(dp=8, ep=ep))


def spread(ep: int) -> LayerKind:
    return block(spread_shape(ep))


def test_a_rank_has_whole_experts_before_the_rest() -> None:
    one, four = spread(1), spread(4)
    experts = [tensor for tensor in one.tensors if tensor.experts]
    assert (one.whole_experts, one.ep) == (0, 1)
    assert four.whole_experts == sum(tensor.elements for tensor in experts) // 4
    held = four.tensors[:3]
    assert [tensor.experts for tensor in held] == [2, 2, 2]
    assert [tensor.rows for tensor in held] == [MIXTRAL.ffn] * 3
    assert four.whole_experts == sum(tensor.elements for tensor in held)
    rest = {tensor for tensor in one.tensors if not tensor.experts}
    assert set(four.tensors[3:]) == rest


def test_two_of_eight_ranks_share_an_expert_and_all_share_the_rest() -> None:
    kind = spread(4)
    rest = kind.parameters - kind.whole_experts
    assert kind.owned(1) == kind.parameters
    assert kind.owned(8) == kind.whole_experts // 2 + -(-rest // (8 * kind.unit)) * kind.unit
    assert kind.padded(8) == kind.whole_experts + 8 * (kind.owned(8) - kind.whole_experts // 2)


def test_rows_go_to_other_ranks_and_come_back_both_ways() -> None:
    """As many rows as a rank sends reach it, so that its products are those of one rank alone."""
    one, four = spread(1), spread(4)
    for name in ("mlp up", "mlp down", "mlp up by weight"):
        assert gemm(four, name).flops == gemm(one, name).flops
        assert (gemm(one, name).groups, gemm(four, name).groups) == (8, 2)
    came = 2 * ranks_reached(spread_shape(4)) * LENGTH * MIXTRAL.hidden
    numbers = 4 * ranks_reached(spread_shape(4)) * LENGTH * MIXTRAL.experts_per_token

    def sent(operators: tuple[Operator, ...]) -> dict[str, tuple[int, bool]]:
        every = (one for one in operators if isinstance(one, Collective))
        return {one.name: (one.nbytes, one.waits) for one in every}

    moved = {
        "rows sent": (int(came), False),
        "rows returned": (int(came), False),
        "row weights": (int(numbers), False),
    }
    told = {"rows counted": (8 * 4, True), "row choices": (int(numbers), False)}
    assert sent(four.forward) == moved | told
    assert sent(four.backward) == moved
    again = {way: set(sent(four.again(way))) for way in Recompute}
    assert again[Recompute.SELECTIVE] == set()
    assert again[Recompute.MLP] == {"rows sent", "row weights"}
    assert again[Recompute.FULL] == {"rows sent", "row weights", *told}
    assert not sent((*one.forward, *one.backward))


def test_a_token_goes_once_to_each_rank_with_its_experts() -> None:
    """Counted over every choice of two among eight experts; in groups, of the best two of four."""
    for ep in (2, 4, 8):
        mine = 8 // ep
        choices = list(combinations(range(8), 2))
        mean = sum(len({expert // mine for expert in one}) for one in choices) / len(choices)
        assert ranks_reached(spread_shape(ep)) == pytest.approx(mean)
    routing = {"scores": "sigmoid", "groups": 4, "groups_per_token": 2}
    model = ModelSpec.model_validate(
        MIXTRAL.model_dump()
        | {"experts": 16, "experts_per_token": 3, "routing": routing, "router_loss": 0.0}
    )
    for ep in (2, 4, 8):
        mine, found = 16 // ep, []
        for groups in combinations(range(4), 2):
            among = [4 * group + i for group in groups for i in range(4)]
            found += [len({expert // mine for expert in one}) for one in combinations(among, 3)]
        assert ranks_reached(spread_shape(ep, model)) == pytest.approx(sum(found) / len(found))


def test_what_comes_from_other_ranks_is_kept_unless_it_is_sent_again() -> None:
    one, four = spread(1), spread(4)
    rows, reached = LENGTH * MIXTRAL.experts_per_token, ranks_reached(spread_shape(4))
    came = int(2 * reached * LENGTH * MIXTRAL.hidden)
    places = int(4 * reached * rows) + int(4 * reached * LENGTH) + 8 * rows
    added = {way: four.kept(way) - one.kept(way) for way in Recompute}
    assert added == {
        Recompute.NONE: came + places,
        Recompute.SELECTIVE: came + places,
        Recompute.MLP: places,
        Recompute.FULL: 0,
    }
    assert {way for way in Recompute if four.varies(way)} == {Recompute.NONE, Recompute.SELECTIVE}
    assert not any(one.varies(way) for way in Recompute)


def test_a_pass_has_room_for_more_rows_than_an_equal_share() -> None:
    one, four = spread(1), spread(4)
    rows = 2 * LENGTH * MIXTRAL.experts_per_token
    came = 2 * int(2 * ranks_reached(spread_shape(4)) * LENGTH * MIXTRAL.hidden)
    within = came + (2 * MIXTRAL.hidden + 3 * MIXTRAL.ffn) * rows
    assert four.forward_workspace == one.forward_workspace + came + within // 4


def test_whole_experts_leave_a_shared_mlp_its_collectives() -> None:
    """Ranks that have whole experts exchange rows; the MLP beside them is split as ever."""
    whole = replace(shape(find_model("deepseek-v2-lite"), tp=2), dispatched=True)
    forward = [c.name for c in block(whole).forward if isinstance(c, Collective)]
    assert [name for name in forward if "shared" in name] == [
        "shared input gather",
        "shared output sum",
    ]
    assert not any("mlp" in name for name in forward)
