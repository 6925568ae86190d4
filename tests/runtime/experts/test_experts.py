"""Experts against a loop over tokens, and the rows between router and experts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts import mlp as expert_mlp
from bigplan.runtime.experts.mixture import DOWN, GATE, ROUTER, UP, Mixture
from bigplan.runtime.layers.sums import Sums
from bigplan.spec.model import ModelSpec
from bigplan.spec.routing import Routing
from tests.examples import examples
from tests.runtime.plans import tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# In units of the largest element: roundings of some hundred terms in fp32; in bf16 those to 2^-9 of
# five products and sums, which may all lead the same way.
APART = {torch.float32: 1e-5, torch.bfloat16: 5 * 2**-8}


@pytest.fixture(autouse=True, scope="module")
def _plain_fp32() -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


class _Case(NamedTuple):
    """Parameters, the stream and what experts read; the loss is a product with `by_output`."""

    model: ModelSpec
    p: dict[str, Tensor]
    x: Tensor
    normed: Tensor
    by_output: Tensor

    @classmethod
    def of(
        cls, model: ModelSpec, tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> _Case:
        generator = torch.Generator().manual_seed(tokens)

        def make(*shape: int) -> Tensor:
            made = torch.randn(*shape, generator=generator) * 0.5
            return made.to(device, dtype).requires_grad_()

        p = {q.name: make(*q.shape) for q in model.kinds()["block"] if _of_mlp(q.name)}
        hidden = (1, tokens, model.hidden)
        return cls(model, p, make(*hidden), make(*hidden), make(*hidden).detach())

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.normed, *self.p.values()]

    def exact(self) -> _Case:
        """The same values in fp64."""
        p, *others = ({n: _wide(t) for n, t in self.p.items()}, *map(_wide, self[2:]))
        return _Case(self.model, p, *others)

    def run(self, how: Mixture, sums: Sums | None = None) -> list[Tensor]:
        """Output, gradients by leaves; those of matrices come from `sums` if there are some."""
        output = expert_mlp.mlp(self.p, self.x, self.normed, self.model, how)
        leaves = self.leaves if sums is None else self.leaves[:2]
        found = [output, *torch.autograd.grad(output, leaves, self.by_output)]
        return found if sums is None else [*found, *(sums.totals[name] for name in self.p)]


def _of_mlp(name: str) -> bool:
    return name == ROUTER or name.startswith("experts.")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _token_by_token(case: _Case, chosen: Tensor) -> Tensor:
    """Each token through the experts `chosen` [tokens, k] for it, one after the other."""
    model, p, outputs = case.model, case.p, []
    each = {name: p[name].view(model.ffn, model.experts, -1).unbind(1) for name in (GATE, UP, DOWN)}
    for x, normed, mine in zip(case.x[0], case.normed[0], chosen, strict=True):
        values = (p[ROUTER] @ normed).softmax(0)[mine]
        if model.router_normalised:
            values = values / values.sum()
        added = torch.zeros_like(x)
        for weight, e in zip(values, mine.tolist(), strict=True):
            gate, up, down = (each[name][e] for name in (GATE, UP, DOWN))
            added = added + weight * ((F.silu(gate @ normed) * (up @ normed)) @ down)
        outputs.append(x + added)
    return torch.stack(outputs)[None]


def _exact(case: _Case) -> list[Tensor]:
    """The loop in fp64; experts are chosen by scores in the case's dtype, which rounds ties."""
    shares = F.linear(case.normed[0], case.p[ROUTER]).float().softmax(-1)
    wide = case.exact()
    output = _token_by_token(wide, shares.topk(case.model.experts_per_token).indices)
    return [output, *torch.autograd.grad(output, wide.leaves, wide.by_output)]


def _apart(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Of every tensor, to its largest element; one that is nothing, to a tenth of the others'."""
    sizes = [float(one.detach().abs().max()) for one in exact]
    pairs = zip(ours, exact, (max(size, 0.1 * max(sizes)) for size in sizes), strict=True)
    return max(float((a.double() - b).detach().abs().max()) / size for a, b, size in pairs)


def _model(experts: int, each: int, *, normalised: bool = True, **changes: object) -> ModelSpec:
    sizes = {"hidden": 32, "ffn": 24, "heads": 4, "layers": 1}
    return tiny_model(
        experts=experts, experts_per_token=each, router_normalised=normalised, **sizes | changes
    )


hows = st.sampled_from((Mixture(), Mixture(gated=True)))
kinds = st.tuples(st.sampled_from((1, 3, 8, 40)), st.integers(1, 3), st.booleans()).filter(
    lambda kind: kind[1] <= kind[0]
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(APART), ids=str)
@given(kinds, st.sampled_from((1, 2, 17, 64)), hows, st.booleans())
@settings(max_examples=examples(20), derandomize=True, deadline=None)
def test_experts_compute_what_a_loop_over_tokens_does(
    device: str,
    dtype: torch.dtype,
    kind: tuple[int, int, bool],
    tokens: int,
    how: Mixture,
    in_product: bool,
) -> None:
    """Values and all gradients; with 40 experts and one token most have no row."""
    experts, each, normalised = kind
    case = _Case.of(_model(experts, each, normalised=normalised), tokens, dtype, device)
    sums = None
    if in_product:
        sums = Sums()
        sums.open(
            {n: torch.full_like(t, torch.nan, dtype=torch.float32) for n, t in case.p.items()},
            fresh=True,
        )
        how = how._replace(sums=sums)
    assert _apart(case.run(how, sums), _exact(case)) < APART[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(APART), ids=str)
@pytest.mark.parametrize("each", [1, 2])
def test_experts_without_a_token_and_one_with_all(
    device: str, dtype: torch.dtype, each: int
) -> None:
    """They get gradients of zeros."""
    case = _Case.of(_model(6, each), 24, dtype, device)
    with torch.no_grad():
        case.normed.abs_()
        case.p[ROUTER].zero_()
        case.p[ROUTER][:each] = 0.25  # and no other expert is as likely
    found = case.run(Mixture())
    exact = _exact(case)
    assert _apart(found, exact) < APART[dtype]
    for name, gradient in zip(case.p, found[3:], strict=True):
        if name != ROUTER:
            by_expert = gradient.view(case.model.ffn, 6, -1).abs().sum((0, 2)) > 0
            assert by_expert.tolist() == [True] * each + [False] * (6 - each)


@pytest.mark.parametrize("device", DEVICES)
@given(kinds, st.integers(1, 50))
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_rows_lie_by_expert_in_the_order_of_tokens(
    device: str, kind: tuple[int, int, bool], tokens: int
) -> None:
    count, each, normalised = kind
    scores = torch.randn(tokens, count, generator=torch.Generator().manual_seed(tokens)).to(device)
    weights, places = experts.route(scores, each, normalised=normalised)
    shares, chosen = scores.softmax(-1).cpu().topk(each)
    choices = [(e, t, i) for t, row in enumerate(chosen.tolist()) for i, e in enumerate(row)]
    wanted = sorted(choices)
    assert places.order.tolist() == [t * each + i for _, t, i in wanted]
    assert places.tokens.tolist() == [t for _, t, _ in wanted]
    assert places.order[places.rows].tolist() == list(range(tokens * each))
    counts = [sum(e == expert for e, _, _ in wanted) for expert in range(count)]
    assert places.ends(count).diff(prepend=places.order.new_zeros(1)).tolist() == counts
    if normalised:
        shares /= shares.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.cpu(), torch.stack([shares[t, i] for _, t, i in wanted]))
    x = torch.arange(tokens, device=device)[:, None].float()
    rows = experts.sent(x, places)
    assert rows[:, 0].tolist() == [t for _, t, _ in wanted]
    assert torch.equal(experts.combined(rows, places), each * x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
def test_the_same_rows_give_the_same_bits(device: str, *, gated: bool) -> None:
    """Nothing is added in an order that chance decides."""
    case = _Case.of(_model(8, 3), 200, torch.bfloat16, device)
    first = case.run(Mixture(gated=gated))
    for _ in range(3):
        assert all(map(torch.equal, first, case.run(Mixture(gated=gated))))


def _balance(case: _Case) -> Tensor:
    """As Hugging Face's load_balancing_loss_func has it for one layer."""
    shares = (case.normed[0] @ case.p[ROUTER].T).softmax(-1)
    chosen = shares.topk(case.model.experts_per_token).indices
    busy = F.one_hot(chosen, case.model.experts).to(shares.dtype).mean(0)  # [k, experts]
    return case.model.experts * (busy * shares.mean(0)).sum()


@pytest.mark.parametrize("device", DEVICES)
@given(kinds, st.sampled_from((1, 17)), hows)
@settings(max_examples=examples(20), derandomize=True, deadline=None)
def test_balance_weighs_in_the_gradients(
    device: str, kind: tuple[int, int, bool], tokens: int, how: Mixture
) -> None:
    """In those of the router and of what it reads, and in no value."""
    count, each, normalised = kind
    case = _Case.of(_model(count, each, normalised=normalised), tokens, torch.float64, device)
    weight = 3.0
    alone, found = case.run(how), case.run(how._replace(balance=lambda: weight))
    leaves = [case.normed, case.p[ROUTER]]
    wanted = torch.autograd.grad(weight * _balance(case), leaves)
    assert torch.equal(found[0], alone[0])
    for ours, plain in zip((2, 3), wanted, strict=True):
        # Routers compute in fp32, whatever the dtype, and this is a difference of two gradients.
        torch.testing.assert_close(found[ours] - alone[ours], plain, rtol=1e-5, atol=4e-6)
    for ours in (1, 4, 5, 6):
        assert torch.equal(found[ours], alone[ours])


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_sigmoids_read_are_in_fp32(device: str) -> None:
    """Rounded to bf16, they would choose other experts for some of these tokens."""
    made = torch.Generator().manual_seed(0)
    x, router = (torch.randn(*shape, generator=made) for shape in ((512, 64), (40, 64)))
    x, router = (one.to(device, torch.bfloat16) for one in (x, 0.02 * router))
    exact = x.double() @ router.double().T
    scores = experts.router_scores(x, router, Routing(scores="sigmoid"))
    assert scores.dtype is torch.float32
    assert float((scores - exact).abs().max()) < 1e-6
    rounded = experts.router_scores(x, router, Routing())
    others = [one.topk(8).indices.sort().values for one in (rounded.double(), scores.double())]
    chosen = exact.topk(8).indices.sort().values
    differing = [float((other != chosen).any(1).double().mean()) for other in others]
    assert differing[0] > 0.005
    assert not differing[1]
