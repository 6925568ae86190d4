"""Attention that keeps documents apart: a packed sequence is its documents, each run alone."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.data.prepare import Preparation, prepare
from bigplan.data.tokenizer import BYTE_END
from bigplan.errors import InputError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import CAPPED_BLOCK as BLOCK
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime.attention import isolated
from bigplan.runtime.attention.in_blocks import Scores
from bigplan.runtime.data import IGNORED, BatchSource
from bigplan.runtime.layers import blocks
from bigplan.runtime.weights.first_values import first_values, whole_values
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import TrainingRequest, ValidationSpec, resolve
from tests.data.texts import write_texts
from tests.examples import examples
from tests.runtime.checkpoints import on_device
from tests.runtime.handing import hidden_states
from tests.runtime.harness import check, evaluated, execute, same
from tests.runtime.parallel.context_ranks import BLOOM
from tests.runtime.parallel.sharded_ranks import (
    GEMMA,
    GEMMA4_E,
    GPT2,
    GPT_OSS,
    GRANITE_4,
    LATENT,
    LFM2,
    QWEN3_NEXT,
)
from tests.runtime.plans import LENGTH, placed, plan_of, tiny_model, tiny_training
from tests.runtime.rounding import check_within_rounding
from tests.toys import kind_placement

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of the results' formats, relative to a tensor's norm, as in test_attention.py.
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
NARROW = LATENT | {"latent_attention": {**LATENT["latent_attention"], "value_dim": 6}}  # type: ignore[dict-item]
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gpt2": GPT2,
    "bloom": BLOOM,
    "gemma": GEMMA,
    "gpt-oss": GPT_OSS,
    "deepseek": NARROW,
    "lfm2": LFM2,
    "qwen3-next": QWEN3_NEXT,
    "granite-4": GRANITE_4,
    "gemma-4-e": GEMMA4_E | {"layers": 4},
}
DOCUMENTS = [f"Document {i} says {i * i} things. " * (1 + i % 3) for i in range(30)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        source = write_texts(Path(name) / "texts.jsonl", DOCUMENTS)
        prepare(Preparation((source,)), Path(name) / "prepared")
        yield Path(name) / "prepared"


def bounds(length: int, *sequences: list[int]) -> Tensor:
    """Of sequences that are cut at these places."""
    rows = []
    for cuts in sequences:
        borders = [0, *sorted({cut for cut in cuts if 0 < cut < length}), length]
        rows.append([(a, b) for a, b in pairwise(borders) for _ in range(a, b)])
    return torch.tensor(rows, dtype=torch.int32).transpose(1, 2).contiguous()


def dense(heads: list[Tensor], scores: Scores, sinks: Tensor | None) -> Tensor:
    """The definition, in fp64: a score for each pair of tokens."""
    q, k, v = (x.double().transpose(1, 2) for x in heads)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    place = torch.arange(q.shape[2], device=q.device)
    distance = place - place[:, None]
    found = q @ k.mT * scores.scale
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    if scores.slopes is not None:
        found = found + scores.slopes.double()[:, None, None] * distance
    assert scores.bounds is not None
    begins = scores.bounds[:, 0]
    apart = begins[:, :, None] != begins[:, None, :]
    hidden = (distance > 0) | (distance <= -(scores.window or q.shape[2])) | apart[:, None]
    found = found.masked_fill(hidden, -math.inf)
    every = found.new_full((*found.shape[:3], 1), -math.inf)
    if sinks is not None:
        every = sinks.double()[:, None, None].expand_as(every)
    shares = torch.cat((found, every), -1).softmax(-1)[..., :-1]
    return (shares @ v).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@given(
    length=st.integers(1, 2 * BLOCK + 50),
    cuts=st.tuples(*[st.lists(st.integers(1, 2 * BLOCK + 49), max_size=8)] * 2),
    window=st.none() | st.integers(1, 200),
    cap=st.sampled_from([None, 0.9]),
    biased=st.booleans(),
    sunk=st.booleans(),
    narrow=st.booleans(),
    dtype=st.sampled_from([*ROUNDING]),
)
@settings(max_examples=examples(25), derandomize=True, deadline=None)
def test_a_token_sees_its_own_document_alone(
    device: str,
    length: int,
    cuts: tuple[list[int], list[int]],
    window: int | None,
    cap: float | None,
    biased: bool,
    sunk: bool,
    narrow: bool,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(length)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device) if biased else None
    scores = Scores(0.2, cap, window, slopes, bounds(length, *cuts).to(device))
    values = 8 if narrow else 16
    sizes = (4, 16), (2, 16), (2, values)
    inputs = [make(2, length, n, width).requires_grad_() for n, width in sizes]
    sinks = make(4).requires_grad_() if sunk else None
    gradient, every = make(2, length, 4, values), [*inputs, *([] if sinks is None else [sinks])]
    generated = device == "cuda"
    heads = inputs[0], inputs[1], inputs[2]
    found = isolated.attention(heads, scores, sinks, generated=generated)
    expected = dense(inputs, scores, sinks)
    ours = found, *torch.autograd.grad(found, every, gradient)
    theirs = expected, *torch.autograd.grad(expected, every, gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        size = torch.maximum(other.detach().norm(), gradient.double().norm())
        assert (one.double() - other).norm() < 2 * ROUNDING[dtype] * size


def _losses(
    model: ModelSpec, p: list[dict[str, Tensor]], tokens: Tensor, bounds: Tensor | None
) -> Tensor:
    """Of each target of one sequence, in fp32."""
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    if bounds is not None:  # a document's first token is no target
        targets[:, :-1][bounds[:, 0, 1:] != bounds[:, 0, :-1]] = IGNORED
    x = hidden_states(model, p, tokens, bounds)
    head = p[-1] | (p[0] if model.tied_embeddings else {})
    each = [blocks.head_loss(head, x[0, i : i + 1], targets[0, i : i + 1], model) for i in
            range(tokens.shape[1]) if targets[0, i] != IGNORED]  # fmt: skip
    return torch.stack(each)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_a_packed_sequence_are_those_of_its_documents(family: str) -> None:
    model = tiny_model(max_sequence_length=64, **({"layers": 3} | FAMILIES[family]))
    first = first_values(model, tiny_training(1))
    p = [
        {one.name: whole_values(first, name, layer, one) for one in model.kinds()[name]}
        for layer, name in enumerate(model.layer_sequence())
    ]
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(2))
    cuts = [0, 3, 17, 30, 40]
    packed = _losses(model, p, tokens, bounds(40, cuts))
    alone = [_losses(model, p, tokens[:, a:b], None) for a, b in pairwise(cuts)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    crossing = _losses(model, p, tokens, None)
    assert not torch.allclose(crossing[:2].sum() + crossing[3:].sum(), packed.sum(), rtol=1e-4)


def _plan(folder: Path, *, away: bool = False, **changes: object) -> Plan:
    """Three groups of two micro-batches; `away`: tables stay in host memory, rows are looked up."""
    model, validation = (
        tiny_model(**(GPT2 | {"tied_embeddings": False})),
        ValidationSpec(data=str(folder), every=1),
    )
    recompute = {Recompute.FULL: {Tier.GPU: 1}, Recompute.SELECTIVE: {Tier.GPU: 1}}
    block = kind_placement(2).model_copy(update={"activations": recompute})
    kind = kind_placement(1, Tier.HOST, Tier.HOST, optimizer=Tier.HOST) if away else None
    kind = kind or kind_placement(1)
    training = tiny_training(
        6, data=str(folder), validation=validation, isolate_documents=True, **changes
    )
    placement = placed(embedding=kind, block=block, head=kind)
    return plan_of(model, training, Strategy(dp=1, accumulation_group=2), placement)


@pytest.mark.parametrize("away", [False, True])
def test_a_run_trains_as_a_plain_loop_does(folder: Path, away: bool) -> None:
    plan = _plan(folder, away=away, clip_norm=0.5)
    check(plan, execute(plan))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_graphs_find_the_documents_of_every_step(folder: Path, recompute: Recompute) -> None:
    """Which are others in each: a graph that had those of its capture would have other losses."""
    plan = _plan(folder, precision="bf16", clip_norm=0.5)
    block = kind_placement(2, activations=(recompute, Tier.GPU))
    placement = placed(embedding=kind_placement(1), block=block, head=kind_placement(1))
    plan = on_device(plan.model_copy(update={"placement": placement}), "cuda")
    captured = placement.model_copy(update={"captured": True})
    plain = execute(plan, steps=6)
    repeated = execute(plan.model_copy(update={"placement": captured}), steps=6)
    assert repeated.graphs == 2 * 6 * 2
    assert plain.losses == repeated.losses
    same("the last step", plain.states[-1], repeated.states[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("away", [False, True])
def test_an_fp32_run_on_a_gpu_is_the_plain_loop(folder: Path, away: bool) -> None:
    plan = on_device(_plan(folder, away=away), "cuda")
    check_within_rounding(plan, execute(plan))


def test_a_validation_is_isolated_too(folder: Path) -> None:
    plan = _plan(folder)
    crossing = plan.training.model_copy(update={"isolate_documents": False})
    found, other = evaluated(plan), evaluated(plan.model_copy(update={"training": crossing}))
    assert found != pytest.approx(other, rel=2e-5)
    source = BatchSource.of(plan, 0, str(folder), 8)
    total, count = 0.0, 0
    first = first_values(plan.model, plan.training)
    p = [
        {one.name: whole_values(first, name, layer, one) for one in plan.model.kinds()[name]}
        for layer, name in enumerate(plan.model.layer_sequence())
    ]
    for step in range(source.steps or 0):
        for number, where in enumerate(source.bounds(step)):
            batch = source.batch(step, number)
            for row, cuts in enumerate(where):
                for a, b in pairwise([*cuts[0].unique().tolist(), LENGTH]):
                    tokens, targets = batch.tokens[row, a:b], batch.targets[row, a:b]
                    wanted = targets != IGNORED
                    if wanted.any():
                        last = targets[-1:] if wanted[-1] else torch.zeros(0, dtype=torch.int64)
                        whole = torch.cat((tokens, last))[None]
                        if whole.shape[1] > 1:
                            total += float(_losses(plan.model, p, whole, None).sum())
                            count += whole.shape[1] - 1
    assert count == source.counted(0)
    assert found == pytest.approx(total / count, rel=2e-6)


def test_plain_text_has_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_bytes(b"no document ends here " * 20)
    with pytest.raises(InputError, match="in which no document ends; run `bigplan data prepare`"):
        BatchSource(path, LENGTH, 1, 0, 1, 0, isolated=True)


def test_targets_are_of_the_same_document(folder: Path) -> None:
    apart, crossing = (
        BatchSource(folder, LENGTH, 4, 0, 1, seed=3, isolated=isolated)
        for isolated in (True, False)
    )
    for step in range(3):
        one, other = apart.batch(step, 0), crossing.batch(step, 0)
        assert torch.equal(one.tokens, other.tokens)
        hidden = one.targets == IGNORED
        assert torch.equal(one.targets[~hidden], other.targets[~hidden])
        assert torch.equal(hidden, one.tokens == BYTE_END)
        assert one.counted == int((~hidden).sum())


def test_materialised_scores_are_refused() -> None:
    with pytest.raises(InputError, match="isolate_documents does not go with attention"):
        resolve(TrainingRequest(attention="materialised", isolate_documents=True), tiny_model())
