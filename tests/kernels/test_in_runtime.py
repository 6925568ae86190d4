"""The runtime's blocks by generated kernels: the same numbers, and the same tensors kept."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.kernels.library import Library
from bigplan.kernels.optimised import Optimiser
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime import generated
from bigplan.runtime.generated import LossRule
from bigplan.runtime.layers import blocks
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.kinds import Block
from bigplan.runtime.layers.products import Products
from bigplan.runtime.mixers import positions
from bigplan.runtime.mixers.ways import PLAIN
from bigplan.spec.catalog import find_model
from bigplan.spec.gpu import find_gpu
from bigplan.spec.layers import TABLE
from bigplan.spec.model import ModelSpec
from bigplan.spec.multiprocessor import closest_to
from bigplan.spec.xielu import EDGE, SLOPE
from tests.kernels.generated import DEVICE, error, random
from tests.runtime.harness import execute
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.toys import kind_placement

# fp32 sums of some hundred terms in another order, through a block (as in test_blocks.py).
TOLERANCE = 1e-5
# Of every family of blocks: layer norms and GELU, ReLU, partial rotary positions beside parallel
# residuals, linear biases and a norm of the embedding, RMSNorms and gates, norms of heads.
NEOX = {"positions": "rope", "rotary_fraction": 0.25, "parallel_residual": True, "head_dim": 16}
LATENT = {"query_rank": 16, "kv_rank": 16, "plain_dim": 4, "rope_dim": 4, "value_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2-xl", {}),
    "opt": ("opt-13b", {}),
    "neox": ("gpt2-xl", NEOX),
    "bloom": ("bloom-176b", {}),
    "llama": ("llama-3-8b", {}),
    "qwen3": ("llama-3-8b", {"qk_norm": True}),
    "gemma": ("gemma-2-9b", {"sliding_window": 3}),
    "gemma3": ("gemma-3-4b", {"sliding_window": 3}),
    "olmo2": ("llama-3-8b", {"norms": "after", "qk_norm": True, "qk_norm_whole": True}),
    "granite": ("llama-3-8b", {"residual_scale": 0.3, "logit_scale": 0.5}),
    "cohere": ("mpt-7b", {"positions": "rope", "parallel_residual": True, "shared_norm": True}),
    "nemotron": ("starcoder2-7b", {"mlp": "relu2", "norm_plus_one": True}),
    "apertus": ("llama-3-8b", {"qk_norm": True, "mlp": "xielu"}),
    "deepseek": ("llama-3-8b", {"heads": 2, "kv_heads": 2, "latent_attention": LATENT}),
    "mixtral": ("mixtral-8x7b", {"experts": 4}),
    "qwen3-moe": ("qwen3-30b-a3b", {"experts": 5, "experts_per_token": 3}),
}
# Without rope softmax ignores what is added to all keys alike; xIELU's last numbers are constants.
NO_GRADIENT = ("k_proj.bias", SLOPE, EDGE)
SIZES = {"layers": 1, "hidden": 48, "ffn": 80, "head_dim": 8, "vocab": 96}


def _small(name: str) -> ModelSpec:
    shipped, changes = FAMILIES[name]
    model = find_model(shipped)
    groups = min(2, model.heads // model.kv_heads)
    sizes = SIZES | {"heads": 2 * groups, "kv_heads": 2, "max_sequence_length": 64}
    return ModelSpec.model_validate(model.model_dump() | sizes | changes)


@pytest.fixture(autouse=True)
def _kernels_run_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU in Triton's interpreter, which the runtime never takes by itself."""
    monkeypatch.setattr(generated, "runs_kernels", lambda device: True)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(Optimiser("h200-sxm", 0.0).pricer)


def _parameters(model: ModelSpec, kind: str) -> dict[str, Tensor]:
    kinds = model.kinds()
    tied = kind == "head" and model.tied_embeddings
    named = {p.name: p for p in kinds[kind]}
    named |= {p.name: p for p in kinds["embedding"] if tied and p.name == TABLE}
    made = {n: random(i, *p.shape) * 0.2 for i, (n, p) in enumerate(named.items())}
    return {n: (t + float(t.dim() == 1)).requires_grad_() for n, t in made.items()}


def _gradients(result: Tensor, p: dict[str, Tensor], x: Tensor, given: Tensor) -> list[Tensor]:
    wanted = [t for name, t in p.items() if name not in NO_GRADIENT]
    return [result.detach(), *torch.autograd.grad(result, [x, *wanted], given)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_and_the_loss_are_those_of_plain_torch(name: str, library: Library) -> None:
    model = _small(name)
    tables = positions.position_tables(model, 5, DEVICE, torch.float32)
    p, x = _parameters(model, "block"), random(50, 1, 5, 48).requires_grad_()
    given = random(51, 1, 5, 48)
    before = given.clone()
    found = []
    for kernels in (None, library):
        ways = Products(kernels=kernels).ways
        found.append(_gradients(blocks.block(p, x, model, tables, ways), p, x, given))
    assert torch.equal(given, before)  # it is the caller's
    for ours, plain in zip(found[1], found[0], strict=True):
        assert error(ours, plain.double()) < TOLERANCE
    p, targets = _parameters(model, "head"), torch.arange(5, device=DEVICE)[None] * 20 - 1
    scale = generated.scale_of(0.25, x.device)
    ways = PLAIN._replace(
        kernels=library,
        loss=partial(generated.cross_entropy, LossRule(library, scale, model.logit_cap)),
    )
    targets[targets < 0] = -100
    plain = blocks.head_loss(p, x, targets, model)
    expected = _gradients(plain, p, x, torch.full_like(plain, 0.25))
    loss = blocks.head_loss(p, x, targets, model, ways)
    for ours, right in zip(_gradients(loss, p, x, torch.ones_like(loss)), expected, strict=True):
        assert error(ours, right.double()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("gpt2", Recompute.NONE),
        ("opt", Recompute.SELECTIVE),
        ("llama", Recompute.SELECTIVE),
        ("gemma", Recompute.MLP),
        ("apertus", Recompute.SELECTIVE),
        ("mixtral", Recompute.NONE),
    ],
)
def test_a_block_keeps_the_same_bytes(name: str, recompute: Recompute, library: Library) -> None:
    model = _small(name)
    tables = positions.position_tables(model, 8, DEVICE, torch.float32)
    p = _parameters(model, "block")
    flat = torch.cat([t.detach().flatten() for t in p.values()])
    parts = torch.split(flat, [t.numel() for t in p.values()])
    views = {n: part.view(t.shape) for (n, t), part in zip(p.items(), parts, strict=True)}
    x, given, found = random(0, 1, 8, 48), random(1, 1, 8, 48), []
    for kernels in (None, library):
        kept = KeptActivations(weights=flat.view(torch.uint8))
        block = Block(model, tables, in_product=False, kernels=kernels)
        out = block.record(views, x, kept, recompute)
        nbytes = kept.nbytes
        by_x, by_weights = kept.gradients(given.clone())
        by_weights = {n: t for n, t in by_weights.items() if n not in NO_GRADIENT}
        found.append((nbytes, [out, by_x, *by_weights.values()]))
    assert found[0][0] == found[1][0]
    for ours, plain in zip(found[1][1], found[0][1], strict=True):
        assert error(ours, plain.double()) < TOLERANCE


def _plan(kernels: str, **style: object) -> Plan:
    placement = placed(
        embedding=kind_placement(1),
        block=kind_placement(1, Tier.HOST, Tier.HOST, (Recompute.SELECTIVE, Tier.HOST), Tier.HOST),
        head=kind_placement(1),
    )
    training = tiny_training(1, kernels=kernels, sequence_length=6)
    plan = plan_of(tiny_model(layers=1, **style), training, Strategy(dp=1), placement, DEVICE)
    return plan.model_copy(update={"placement": placement.model_copy(update={"loss_chunk": 5})})


@pytest.mark.parametrize(
    "style",
    [
        {},
        {"norm": "layernorm", "mlp": "gelu_tanh", "positions": "learned", "tied_embeddings": True},
    ],
    ids=["llama", "gpt2"],
)
def test_a_run_trains_as_one_without(style: dict[str, object]) -> None:
    ours, plain = (execute(_plan(way, **style), steps=1) for way in ("generated", "torch"))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    for one, other in zip(ours.states[-1], plain.states[-1], strict=True):
        assert error(one.moments[0], other.moments[0].double()) < TOLERANCE


def test_tensors_at_odd_addresses(library: Library) -> None:
    """Not aligned to what compiled kernels count on, after and before ones that are."""
    whole = random(0, 3 * 40 + 1).bfloat16()
    for start in (0, 1, 0):
        x = whole[start : start + 120].view(3, 40)
        found = library.activation("gelu", x)
        assert error(found, F.gelu(x.double())) < 2**-8


def test_a_gpu_that_is_not_described_has_the_closest_ones_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Voodoo 2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    cuda, training = torch.device("cuda"), tiny_training(1)
    generated._library.cache_clear()
    try:
        made = generated.library_for(training, cuda)
        assert made is not None
        assert made.pricer.gpu == find_gpu("b200")  # 10.0 is closer than 9.0
        assert "'Voodoo 2' are not described" in generated.sized_as(training, cuda)
        plain = tiny_training(1, kernels="torch")
        assert generated.library_for(plain, cuda) is None
        assert not generated.sized_as(plain, cuda)
    finally:
        generated._library.cache_clear()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 6), "rtx-3090"), ((8, 7), "rtx-3090"), ((7, 0), "t4"), ((12, 1), "b200")],
)
def test_the_closest_gpu_is_an_older_one(capability: tuple[int, int], expected: str) -> None:
    assert closest_to(*capability) == expected
