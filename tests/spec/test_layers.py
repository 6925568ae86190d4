"""The steps of a layer fit together, whatever a model has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigplan.spec.layers import TABLE
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import LayerStep, StepOp, StepValue


@st.composite
def any_models(draw: st.DrawFn) -> ModelSpec:
    """Every switch in every position, also what no runtime executes."""
    flag = st.booleans()
    fields: dict[str, object] = {
        "norm": draw(st.sampled_from(("rmsnorm", "layernorm"))),
        "mlp": draw(st.sampled_from(("swiglu", "gelu", "gelu_tanh", "relu"))),
        "positions": draw(st.sampled_from(("rope", "learned", "alibi"))),
        "kv_heads": draw(st.sampled_from((1, 2, 4))),
        "head_dim": draw(st.sampled_from((4, 10))),
    }
    switches = (
        "norm_bias",
        "embedding_norm",
        "parallel_residual",
        "tied_embeddings",
        "qkv_bias",
        "attention_output_bias",
        "mlp_bias",
        "qk_norm",
    )
    sizes = {"layers": 2, "hidden": 24, "ffn": 52, "heads": 4, "vocab": 96}
    fields |= {name: draw(flag) for name in switches}
    if draw(flag):
        fields |= {"experts": 6, "experts_per_token": draw(st.sampled_from((1, 2, 6)))}
        fields |= {"mlp": "swiglu", "mlp_bias": False, "parallel_residual": False}
    fields |= sizes | {"name": "any", "max_sequence_length": 32, "source": "test"}
    return ModelSpec.model_validate(fields)


def _steps(model: ModelSpec) -> list[tuple[LayerStep, ...]]:
    return [model.steps(kind) for kind in ("embedding", "block", "head")]


@given(any_models())
def test_values_are_read_after_they_are_given(model: ModelSpec) -> None:
    hidden = model.hidden
    for steps in _steps(model):
        there = {StepValue("input", hidden, split=False)}
        for step in steps:
            assert there >= {*step.reads}, step.name
            assert not there & {*step.gives}, step.name
            there |= {*step.gives}
            assert {*step.saves} <= {*step.reads, *step.gives}, step.name
        assert len({value.name for value in there}) == len(there)
        assert len({step.name for step in steps}) == len(steps)
    embedding, block, head = _steps(model)
    assert embedding[-1].gives[0].columns() == block[-1].gives[0].columns() == hidden
    assert head[-1].op is StepOp.LOSS


@given(any_models(), st.sampled_from((1, 2, 4)))
def test_matrices_lead_from_what_a_product_reads_to_what_it_gives(
    model: ModelSpec, ranks: int
) -> None:
    """On every rank: whoever has a part of a matrix has the parts of its factors."""
    products = [
        s for steps in _steps(model) for s in steps if s.op is StepOp.PRODUCT and not s.shared
    ]
    for step in products:
        if step.name == "router" or step.parameters[0].experts:
            continue
        (read,) = step.reads
        matrices = [p for p in step.parameters if len(p.shape) == 2]
        for matrix, given_value in zip(matrices, step.gives, strict=True):
            assert matrix.shape == (given_value.columns(), read.columns())
            # One side is split: else each rank would compute all, or a part that nobody adds.
            assert given_value.split != read.split, step.name
            assert matrix.split == ("rows" if given_value.split else "columns")
            # Ranks share out heads and columns; a key's head may be on several.
            assert ranks * given_value.columns(ranks) >= given_value.columns()


@given(any_models(), st.sampled_from((1, 2, 4)))
def test_experts_have_equal_parts_on_every_rank(model: ModelSpec, ranks: int) -> None:
    """One side of their products is split by the inner width of each, and no router is."""
    steps = {step.name: step for step in model.steps("block")}
    grouped = [step for step in steps.values() if any(p.experts for p in step.parameters)]
    assert len(grouped) == 2 * (model.experts > 0)
    for step in grouped:
        (read,), given_value = step.reads, step.gives[0]
        split, stream = (given_value, read) if given_value.split else (read, given_value)
        assert split.split
        assert stream.whole
        assert split.each == stream.each == model.experts_per_token
        for matrix in step.parameters:
            assert matrix.shape == (split.parts * model.experts, stream.parts)
            assert matrix.local(ranks)[0] == split.columns(ranks) // split.each
    if model.experts:
        assert steps["router"].gives[0].columns(ranks) == model.experts
        assert not steps["router"].beside_all
        assert steps["combine"].gives[0] == StepValue("mlp output", model.hidden, split=False)


@given(any_models())
def test_a_shared_table_is_the_embeddings(model: ModelSpec) -> None:
    shared = [step.shared for step in model.steps("head") if step.shared]
    assert shared == [TABLE] * model.tied_embeddings
    assert TABLE in [parameter.name for parameter in model.kinds()["embedding"]]
    names = [parameter.name for parameter in model.kinds()["head"]]
    assert ("lm_head.weight" in names) != model.tied_embeddings


def test_keys_of_few_heads_are_on_several_ranks() -> None:
    keys = StepValue("keys", parts=2, each=16)
    assert [keys.columns(ranks) for ranks in (1, 2, 4)] == [32, 16, 16]
    hidden = StepValue("hidden", parts=64, split=False)
    assert hidden.columns(4) == 64
