"""One optimizer step as a plain torch loop, and how far another order of its sums may lead.

The loop holds the whole model: micro-batch after micro-batch, one `backward()` each that adds to
`.grad`; ranks of data parallelism one after the other, then their gradients added; the factor of
`clip_grad_norm_`; `torch.optim.AdamW`. It shares with the runtime the functions of the layers
(bigplan/runtime/blocks.py, tested against transformers), first values and batches: what is compared
is everything that a plan decides.

**Where the same bits are expected.** From equal weights the gradient of every micro-batch is equal
bit by bit. A plan changes only the order in which `n` such terms are added: see `same_order`. With
equal gradients and a clip factor of exactly one AdamW works element by element, so new weights and
moments are equal bit by bit too.

**How far apart they may be elsewhere**, for one step from equal weights and moments. u = eps / 2 is
the unit roundoff of the dtype gradients are summed in. Any order of adding n terms t errs by at
most (n - 1) u sum|t| to first order (Higham, Accuracy and Stability, 4.2), so two orders differ by
at most e = 2 n u sum|t|, where n for sum (n - 1) pays the higher orders. The runtime squares and
adds the k elements of a layer in fp32: the norm's relative error is at most (k / 2 + 2) u32, plus
what differing gradients add, |e| / |g| over all layers; min(1, limit / norm) has no more. That
fraction of |g| is added to e. Through AdamW, with
m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2, N = m' / (1 - b1^t) and
D = sqrt(v' / (1 - b2^t)) + epsilon:

    |dm'| <= (1 - b1) e,  |dv'| <= (1 - b2) (2 |g| e + e^2)
    |dN| <= (1 - b1) e / (1 - b1^t),  |dD| <= sqrt((1 - b2) / (1 - b2^t)) e
        (the last since |sqrt(a^2 + x^2) - sqrt(a^2 + y^2)| <= |x - y|)
    |dw| <= lr (|dN| + |N| |dD| / D) / D',  D' = max(epsilon, D - |dD|)

plus the roundings of AdamW itself on either side, counted generously as eight of each term. A
gradient near zero may flip its sign, and its weight then moves by up to 2 lr: the bound says so,
element by element, and stays tight for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph
from bigplan.placement import LayerPlacement, Tier
from bigplan.plan import Plan
from bigplan.runtime import blocks
from bigplan.runtime.data import BatchSource, bundled_text
from bigplan.spec.model import Parameter

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNIT = 2.0**-24  # unit roundoff of fp32
CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's fp32 weights and moments, each flat in the order of the model's parameters."""

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


State = tuple[LayerState, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """How far apart a layer's values may be after a step, element by element (fp64)."""

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step: its loss, the state after it, and per layer a bound, None where bits are equal."""

    loss: float
    state: State
    bounds: tuple[Bound | None, ...]


def same_order(graph: Graph, layer: int, placement: LayerPlacement) -> bool:
    """Whether the runtime adds the layer's gradients in the plain loop's order.

    On the GPU it adds micro-batch after micro-batch and reduces over the ranks once, as the loop
    does. Elsewhere it does so within an accumulation group, and then adds the groups' sums: the
    same order with one group, and with groups of one micro-batch unless ranks are reduced in each.
    A tied table also collects the head's part of a whole group before the embedding's; the loop
    adds both of one micro-batch first. One micro-batch: two terms, and a + b = b + a. More than two
    ranks' sums are added in an order that the collective chooses.
    """
    if graph.strategy.dp > 2:
        return False
    if graph.tied and layer == 0:
        return graph.micro_batches == 1
    if placement.gradients is Tier.GPU or graph.units == 1:
        return True
    return graph.strategy.accumulation_group == 1 and graph.strategy.dp == 1


class PlainLoop:
    """The whole model in memory, trained step by step. `state` may be replaced between steps."""

    def __init__(self, plan: Plan, layers: Mapping[int, LayerPlacement]) -> None:
        self._plan, self._layers = plan, layers
        self._graph = build_graph(plan.model, plan.training, plan.strategy)
        training, world = plan.training, plan.strategy.dp
        self._dtype = DTYPES[training.precision]
        self._gradient_dtype = DTYPES[training.gradient_precision]
        self._rope = blocks.rope_table(plan.model, training.sequence_length, "cpu", self._dtype)
        self._sources = [
            BatchSource(
                bundled_text() if training.data == "bundled" else Path(training.data),
                training.sequence_length,
                plan.strategy.micro_batch,
                rank,
                world,
                training.seed,
                training.global_batch,
            )
            for rank in range(world)
        ]
        self._steps = 0
        self.state = self._first_state()

    def _kinds(self) -> list[tuple[Parameter, ...]]:
        return [self._plan.model.kinds()[name] for name in self._graph.layers]

    def _first_state(self) -> State:
        state = []
        for layer, name in enumerate(self._graph.layers):
            values = [
                blocks.initial_values(name, layer, p, self._plan.training.seed).flatten()
                for p in self._plan.model.kinds()[name]
            ]
            flat = torch.cat(values)
            state.append(LayerState(flat, torch.zeros_like(flat), torch.zeros_like(flat)))
        return tuple(state)

    def step(self) -> Outcome:
        """One step from `state`, which becomes the state after it."""
        gradients, magnitudes, loss = self._gradients()
        before = self.state
        factor = self._clip_factor(gradients)
        scaled = [gradient.float() * factor for gradient in gradients]
        self._steps += 1
        self.state = self._adamw(scaled)
        errors = self._errors(scaled, [magnitude * factor for magnitude in magnitudes])
        bounds = tuple(
            self._through_adamw(old, gradient.double(), error) if bool(error.any()) else None
            for old, gradient, error in zip(before, scaled, errors, strict=True)
        )
        return Outcome(loss, self.state, bounds)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor], float]:
        """Every layer's flat gradient, the sum of its terms' magnitudes (fp64), and the loss."""
        magnitudes = [torch.zeros(s.weights.numel(), dtype=torch.float64) for s in self.state]
        total: list[Tensor] = []
        loss = torch.zeros(())
        for source in self._sources:
            leaves = self._leaves()
            losses = []
            for number in range(self._graph.micro_batches):
                tokens, targets = source.batch(self._steps, number)
                share = self._forward(leaves, magnitudes, tokens, targets) * self._share
                torch.autograd.backward(share)
                losses.append(share.detach())
            loss += torch.stack(losses).sum()
            flat = [_gradient(leaf) for leaf in leaves]
            total = [a + b for a, b in zip(total, flat, strict=True)] if total else flat
        return total, magnitudes, float(loss)

    @property
    def _share(self) -> float:
        return 1.0 / (self._graph.micro_batches * self._graph.strategy.dp)

    def _leaves(self) -> list[Tensor]:
        """Flat leaves in the dtype that gradients are summed in: `.grad` has it too."""
        if self._gradient_dtype == self._dtype:
            return [s.weights.to(self._dtype).clone().requires_grad_() for s in self.state]
        return [s.weights.clone().requires_grad_() for s in self.state]

    def _forward(
        self,
        leaves: Sequence[Tensor],
        magnitudes: Sequence[Tensor],
        tokens: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """The loss of one micro-batch; what every use adds to a gradient counts in `magnitudes`."""
        kinds, model = self._kinds(), self._plan.model

        def used(layer: int) -> dict[str, Tensor]:
            return _tensors(leaves[layer], kinds[layer], self._dtype, magnitudes[layer])

        x = blocks.embedding(used(0), tokens)
        for layer in range(1, len(kinds) - 1):
            x = blocks.block(used(layer), x, model, self._rope)
        head = used(len(kinds) - 1)
        if model.tied_embeddings:
            head |= used(0)
        return blocks.head_loss(head, x, targets, model)

    def _clip_factor(self, gradients: Iterable[Tensor]) -> float:
        limit = self._plan.training.clip_norm
        if limit is None:
            return 1.0
        return min(1.0, limit / (_norm(gradients) + CLIP_EPSILON))

    def _adamw(self, gradients: Sequence[Tensor]) -> State:
        """torch.optim.AdamW on every tensor, decay on those that have it."""
        rule = self._plan.training.optimizer
        state = []
        for parameters, old, gradient in zip(self._kinds(), self.state, gradients, strict=True):
            new = LayerState(old.weights.clone(), old.exp_avg.clone(), old.exp_avg_sq.clone())
            views = [_split(t, parameters) for t in (new.weights, new.exp_avg, new.exp_avg_sq)]
            groups, moments = [], dict[Tensor, dict[str, Tensor]]()
            for p, weight, average, square, by in zip(
                parameters, *views, _split(gradient, parameters), strict=True
            ):
                leaf = torch.nn.Parameter(weight)
                leaf.grad = by
                groups.append(
                    {"params": [leaf], "weight_decay": rule.weight_decay if p.decay else 0.0}
                )
                moments[leaf] = {
                    "step": torch.tensor(float(self._steps - 1)),
                    "exp_avg": average,
                    "exp_avg_sq": square,
                }
            optimizer = torch.optim.AdamW(
                groups,
                lr=rule.learning_rate,
                betas=(rule.beta1, rule.beta2),
                eps=rule.epsilon,
                fused=True,
            )
            optimizer.state.update(moments)
            optimizer.step()
            state.append(new)
        return tuple(state)

    def _errors(self, gradients: Sequence[Tensor], magnitudes: Sequence[Tensor]) -> list[Tensor]:
        """The `e` of every layer, in fp64; zero where sums have the same order."""
        unit = torch.finfo(self._gradient_dtype).eps / 2
        errors = []
        for layer, magnitude in enumerate(magnitudes):
            uses = 2 if self._graph.tied and layer == 0 else 1
            terms = uses * self._graph.micro_batches * self._graph.strategy.dp
            exact = same_order(self._graph, layer, self._layers[layer])
            errors.append(magnitude * (0.0 if exact else 2 * terms * unit))
        if not self._clips():
            return errors
        largest = max(gradient.numel() for gradient in gradients)
        off = (largest / 2 + 2) * UNIT + _norm(errors) / _norm(gradients)
        return [e + off * g.double().abs() for e, g in zip(errors, gradients, strict=True)]

    def _clips(self) -> bool:
        """Whether the clip factor may differ from one on either side."""
        limit = self._plan.training.clip_norm
        return limit is not None and limit < INACTIVE

    def _through_adamw(self, old: LayerState, g: Tensor, error: Tensor) -> Bound:
        rule, t = self._plan.training.optimizer, self._steps
        m, v, w = old.exp_avg.double(), old.exp_avg_sq.double(), old.weights.double()
        by_m, by_v = 1 - rule.beta1, 1 - rule.beta2
        unbias_m, unbias_v = 1 - rule.beta1**t, 1 - rule.beta2**t
        new_v = rule.beta2 * v + by_v * g.square()
        numerator = (rule.beta1 * m + by_m * g).abs() / unbias_m
        denominator = (new_v / unbias_v).sqrt() + rule.epsilon
        d_numerator = by_m * error / unbias_m
        d_denominator = (by_v / unbias_v) ** 0.5 * error
        smallest = (denominator - d_denominator).clamp_min(rule.epsilon)
        change = (d_numerator + numerator * d_denominator / denominator) / smallest
        term_m = rule.beta1 * m.abs() + by_m * g.abs()
        rounding = 8 * UNIT
        return Bound(
            rule.learning_rate * (change + rounding * term_m / unbias_m / smallest)
            + rounding * w.abs(),
            by_m * error + rounding * term_m,
            by_v * error * (2 * g.abs() + error) + rounding * new_v,
        )


INACTIVE = 1e3  # a clip_norm that no gradient of these models reaches


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5)


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _split(flat: Tensor, parameters: Sequence[Parameter]) -> list[Tensor]:
    """A flat tensor as views of the parameters' shapes."""
    sizes = [torch.Size(p.shape).numel() for p in parameters]
    return [
        part.view(p.shape) for part, p in zip(torch.split(flat, sizes), parameters, strict=True)
    ]


def _tensors(
    leaf: Tensor, parameters: Sequence[Parameter], dtype: torch.dtype, magnitude: Tensor
) -> dict[str, Tensor]:
    """A layer's tensors in the compute dtype; their gradients' magnitudes are added up."""
    tensors = {}
    for p, part, sums in zip(
        parameters, _split(leaf, parameters), _split(magnitude, parameters), strict=True
    ):
        tensor = part.to(dtype)

        def add(gradient: Tensor, sums: Tensor = sums) -> None:
            sums.add_(gradient.detach().double().abs())

        tensor.register_hook(add)  # type: ignore[no-untyped-call]
        tensors[p.name] = tensor
    return tensors
