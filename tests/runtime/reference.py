"""One optimizer step as a plain torch loop, and how far another order of its sums may lead.

The loop holds the whole model: micro-batch after micro-batch, one `backward()` each that adds to
`.grad`; ranks of data parallelism one after the other, then their gradients added; divided by the
loss scale and by what `clip_grad_norm_` multiplies with the inverse of; `torch.optim.AdamW` or
`SGD`. It shares with the runtime the functions of the layers (bigplan/runtime/layers/blocks.py,
tested against transformers), first values, batches and learning rates: what is compared is
everything that a plan decides. Where gradients are summed in fp32, those of weights are products in
fp32, as in bigplan/runtime/layers/products.py, and go to `.grad` past autograd, which would round
them to 16 bits.

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
fraction of |g| is added to e. A loss scale divides all of this alike. Through AdamW, with
m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2, N = m' / (1 - b1^t) and
D = sqrt(v' / (1 - b2^t)) + epsilon:

    |dm'| <= (1 - b1) e,  |dv'| <= (1 - b2) (2 |g| e + e^2)
    |dN| <= (1 - b1) e / (1 - b1^t),  |dD| <= sqrt((1 - b2) / (1 - b2^t)) e
        (the last since |sqrt(a^2 + x^2) - sqrt(a^2 + y^2)| <= |x - y|)
    |dw| <= lr (|dN| + |N| |dD| / D) / D',  D' = max(epsilon, D - |dD|)

and through SGD by |db| <= e, |dw| <= lr |db|, plus the roundings of the optimizer itself on either
side, counted generously as eight of each term. Under AdamW a gradient near zero may flip its sign,
and its weight then moves by up to 2 lr: the bound says so, element by element, and stays tight for
all others.

**Tensor-parallel ranks** add the terms of a micro-batch's own products in another order, too, so in
fp32 every gradient carries other roundings. An element's depends on at most `n` roundings one after
the other, the lengths of all sums forward and backward (`_roundings`). Taken as independent, all of
them together err by no more than lambda sqrt(n) u with probability 1 - 2 exp(-lambda^2 / 2) (Higham
and Mary, SIAM J. Sci. Comput. 41, 2019); with lambda = 6 one element in 30 million is further off.
That is relative to its terms, which may be larger than an element: to the largest of its layer. So
2 lambda sqrt(n) u of that are added to e. In 16 bits that says nothing; there
tests/runtime/rounding.py compares whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import isfinite, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.graph.graph import Graph
from bigplan.layer_placement import LayerPlacement
from bigplan.placement import Tier
from bigplan.plan import Plan, graph_of
from bigplan.runtime.data import BatchSource, data_path
from bigplan.runtime.experts.dispatch import Adds
from bigplan.runtime.experts.mixture import EXPERTS, Mixture
from bigplan.runtime.layers import blocks, products
from bigplan.runtime.mixers import positions
from bigplan.runtime.mixers.ways import Linears, Ways, plain_linears
from bigplan.runtime.optimizer.fused import VECTOR
from bigplan.runtime.weights.first_values import first_values, whole_values
from bigplan.spec.carried import TABLES
from bigplan.spec.layers import first_block
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import rules
from bigplan.spec.schedule import learning_rate
from bigplan.spec.step import Parameter, StepOp
from tests.runtime.handing import Handing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNIT = 2.0**-24  # unit roundoff of fp32
LAMBDA = 6  # standard deviations
CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's fp32 weights and moments, each flat in the order of the model's parameters.

    AdamW has two moments, SGD its momentum or none.
    """

    weights: Tensor
    moments: tuple[Tensor, ...]

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {"weights": self.weights} | {f"moment {i}": m for i, m in enumerate(self.moments)}

    def clone(self) -> LayerState:
        """Tensors of its own."""
        return LayerState(self.weights.clone(), tuple(m.clone() for m in self.moments))


State = tuple[LayerState, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """How far apart a layer's values may be after a step, element by element (fp64)."""

    weights: Tensor
    moments: tuple[Tensor, ...]

    def tensors(self) -> dict[str, Tensor]:
        """By name, as LayerState's."""
        return {"weights": self.weights} | {f"moment {i}": m for i, m in enumerate(self.moments)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step: its loss, the state after it, and per layer a bound, None where bits are equal."""

    loss: float
    state: State
    bounds: tuple[Bound | None, ...]
    learning_rate: float
    loss_scale: float
    gradient_norm: float | None = None  # None: not finite, and the step was skipped
    norm_error: float = 0.0  # part of the norm


def same_order(graph: Graph, layer: int, placement: LayerPlacement) -> bool:
    """Whether the runtime adds the layer's gradients in the plain loop's order.

    On the GPU it adds micro-batch after micro-batch and reduces over the ranks once, as the loop
    does. Elsewhere, and where ZeRO shares gradients out, it does so within an accumulation group,
    and then adds the groups' sums: the same order with one group, and with groups of one
    micro-batch unless ranks are reduced in each.
    A tied table also collects the head's part of a whole group before the embedding's; the loop
    adds both of one micro-batch first. One micro-batch: two terms, and a + b = b + a. More than two
    ranks' sums are added in an order that the collective chooses.
    """
    if graph.strategy.dp > 2 or graph.strategy.tp * graph.strategy.cp > 1:
        return False
    if graph.tied and layer == 0:
        return graph.micro_batches == 1
    shared_out = graph.strategy.zero >= 2 and not graph.kinds[graph.layers[layer]].pinned
    if graph.units == 1 or (placement.gradients is Tier.GPU and not shared_out):
        return True
    return graph.strategy.accumulation_group == 1 and graph.strategy.dp == 1


class PlainLoop:
    """The whole model in memory, trained step by step. `state` may be replaced between steps."""

    def __init__(self, plan: Plan, layers: Mapping[int, LayerPlacement]) -> None:
        self._plan, self._layers = plan, layers
        self._graph = graph_of(plan)
        training, world = plan.training, plan.strategy.dp
        self._dtype = DTYPES[training.precision]
        self._gradient_dtype = DTYPES[training.gradient_precision]
        length = training.sequence_length
        self._positions = {
            of: positions.position_tables(
                plan.model.seen_by(of[0]), length, "cpu", self._dtype, attends=of[1]
            )
            for of in zip(plan.model.block_kinds, plan.model.attentions, strict=True)
        }
        self._sources = [
            BatchSource(
                data_path(training.data),
                training.sequence_length,
                plan.strategy.sizes[rank],
                rank,
                world,
                training.seed,
                training.global_batch,
                sizes=plan.strategy.sizes,
                isolated=training.isolate_documents,
            )
            for rank in range(world)
        ]
        self._rules = [
            rules(training.optimizer, plan.model, layer) for layer in range(len(self._graph.layers))
        ]
        self._steps = 0
        self.applied = 0
        self._scale = training.loss_scale.initial if training.precision == "fp16" else 1.0
        self._good = 0
        self.state = self._first_state()

    def _kinds(self) -> list[tuple[Parameter, ...]]:
        return [self._plan.model.kinds()[name] for name in self._graph.layers]

    def _first_state(self) -> State:
        state = []
        first = first_values(self._plan.model, self._plan.training)
        moments = self._plan.training.optimizer.kept
        for layer, name in enumerate(self._graph.layers):
            values = [whole_values(first, name, layer, p) for p in self._plan.model.kinds()[name]]
            flat = torch.cat([torch.zeros(0), *(value.flatten() for value in values)])
            empty = tuple(torch.zeros_like(flat) for _ in range(moments))
            state.append(LayerState(flat, empty))
        return tuple(state)

    def step(self) -> Outcome:
        """One step from `state`, which becomes the state after it."""
        training, scale, before = self._plan.training, self._scale, self.state
        gradients, magnitudes, loss = self._gradients()
        self._steps += 1
        rate = learning_rate(training.schedule, training.optimizer, self._steps, training.steps)
        norm = _norm(gradients) / scale
        if training.deferred_updates and not isfinite(norm):
            self._good, self._scale = 0, max(1.0, scale / training.loss_scale.factor)
            return Outcome(loss, before, (None,) * len(before), rate, scale)
        self._good, self.applied = self._good + 1, self.applied + 1
        if training.precision == "fp16" and self._good == training.loss_scale.growth_interval:
            self._good, self._scale = 0, scale * training.loss_scale.factor
        divisor = torch.tensor(scale * self._clip_divisor(norm), dtype=torch.float32)
        scaled = [gradient.float() / divisor for gradient in gradients]
        self.state = self._optimized(scaled, rate)
        errors = self._errors([magnitude / divisor for magnitude in magnitudes])
        off = self._norm_error(scaled, errors)
        if self._clips():
            errors = [e + off * g.double().abs() for e, g in zip(errors, scaled, strict=True)]
        through = self._through_adamw if training.optimizer.name == "adamw" else self._through_sgd
        bounds = tuple(
            through(layer, old, gradient.double(), error, rate) if bool(error.any()) else None
            for layer, (old, gradient, error) in enumerate(zip(before, scaled, errors, strict=True))
        )
        return Outcome(loss, self.state, bounds, rate, scale, norm, off)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor], float]:
        """Every layer's flat gradient, the sum of its terms' magnitudes (fp64), and the loss."""
        magnitudes = [torch.zeros(s.weights.numel(), dtype=torch.float64) for s in self.state]
        total: list[Tensor] = []
        loss = torch.zeros(())
        for source in self._sources:
            leaves = self._leaves()
            losses = []
            for number in range(self._graph.micro_batches):
                batch = source.batch(self._steps, number)
                bounds = source.bounds(self._steps)[number] if source.isolated else None
                data = batch.tokens, batch.targets
                total_loss = self._forward(leaves, magnitudes, *data, bounds)
                share = total_loss * (1.0 / max(1, batch.counted))
                torch.autograd.backward(share * self._scale)
                losses.append(share.detach())
            loss += torch.stack(losses).sum()
            flat = [_gradient(leaf) for leaf in leaves]
            total = [a + b for a, b in zip(total, flat, strict=True)] if total else flat
        return total, magnitudes, float(loss)

    def _leaves(self) -> list[Tensor]:
        """Flat leaves in the dtype that gradients are summed in: `.grad` has it too."""
        if self._gradient_dtype == self._dtype:
            leaves = [s.weights.to(self._dtype).clone().requires_grad_() for s in self.state]
        else:
            leaves = [s.weights.clone().requires_grad_() for s in self.state]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        return leaves

    def _forward(
        self,
        leaves: Sequence[Tensor],
        magnitudes: Sequence[Tensor],
        tokens: Tensor,
        targets: Tensor,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """The loss of one micro-batch; what every use adds to a gradient counts in `magnitudes`."""
        kinds, model = self._kinds(), self._plan.model

        def used(layer: int) -> dict[str, Tensor]:
            return _tensors(leaves[layer], kinds[layer], self._dtype, magnitudes[layer])

        def summed(layer: int) -> _Summed | None:
            if self._gradient_dtype != torch.float32:
                return None
            return _Summed.of(_gradient(leaves[layer]), kinds[layer], magnitudes[layer])

        def linears(layer: int) -> Linears:
            sums = summed(layer)
            return plain_linears if sums is None else sums.linears

        first = _Summed.of(_gradient(leaves[0]), kinds[0], magnitudes[0])
        tables = used(0)
        begins = None if bounds is None else bounds[:, 0]
        x = blocks.embedding_norm(tables, first.embedding(tables, tokens, model, begins), model)
        start = first_block(self._graph.layers)
        rows = None
        if model.block_inputs is not None:
            of_inputs = _Summed.of(_gradient(leaves[1]), kinds[1], magnitudes[1])
            rows = of_inputs.rows(TABLES, used(1), tokens)
        handing = Handing.begun(model, tables, rows, x)
        for layer in range(start, len(kinds) - 1):
            ways = Ways(linears(layer), experts=self._mixture(summed(layer)))
            p = used(layer)
            if summed(layer) is not None:  # as in _Summed.linears
                p |= {name: p[name].detach() for name in EXPERTS if name in p}
            kind = self._graph.layers[layer]
            number = layer - start
            seen, attends = model.seen_by(kind), model.attentions[number]
            p, ways = p | handing.found(number), handing.ways(number, ways)
            positions = self._positions[kind, attends]._replace(bounds=bounds)
            x = blocks.block(p, x, seen, positions, ways)
        last = len(kinds) - 1
        if model.tied_embeddings:
            return blocks.head_loss(used(last) | used(0), x, targets, model, Ways(linears(0)))
        return blocks.head_loss(used(last), x, targets, model, Ways(linears(last)))

    def _mixture(self, sums: _Summed | None) -> Mixture:
        """Experts, of whose balance a step has the mean over blocks, micro-batches and ranks."""
        model, graph = self._plan.model, self._graph
        terms = max(1, model.routed_blocks) * graph.micro_batches * graph.strategy.dp
        weight = model.router_loss / terms * self._scale
        return Mixture(
            sums=None if sums is None else _SummedExperts(sums),
            balance=(lambda: weight) if model.router_loss else None,
        )

    def _clip_divisor(self, norm: float) -> float:
        limit = self._plan.training.clip_norm
        return 1.0 if limit is None else max(1.0, (norm + CLIP_EPSILON) / limit)

    def _optimized(self, gradients: Sequence[Tensor], rate: float) -> State:
        """torch's optimizer on every tensor, with the constants of its group.

        On a CPU its kernels take the last `numel % 16` elements through other code, which rounds
        otherwise, and the runtime lets no element be among them: tensors are filled up.
        """
        state = []
        for layer, (parameters, old, gradient) in enumerate(
            zip(self._kinds(), self.state, gradients, strict=True)
        ):
            new = old.clone()
            groups, moments = [], list[list[Tensor]]()
            views = [_split(tensor, parameters) for tensor in (new.weights, *new.moments)]
            filled = [[_filled(view) for view in each] for each in views]
            for p, by, weight, *mine in zip(
                parameters, _split(gradient, parameters), *filled, strict=True
            ):
                leaf = torch.nn.Parameter(weight)
                leaf.grad = _filled(by)
                rule = self._rules[layer][p.name]
                groups.append(
                    {
                        "params": [leaf],
                        "weight_decay": rule.weight_decay,
                        "lr": rate * rule.learning_rate_factor,
                    }
                )
                moments.append(mine)
            if groups:  # a tied head without weights has none
                self._torch_step(groups, moments)
            for view, one in zip(chain(*views), chain(*filled), strict=True):
                view.copy_(one[: view.numel()].view_as(view))
            state.append(new)
        return tuple(state)

    def _torch_step(self, groups: list[dict[str, Any]], moments: list[list[Tensor]]) -> None:
        """One step of torch.optim from the given moments, which become the new ones."""
        rule = self._plan.training.optimizer
        optimizer: torch.optim.Optimizer
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        if rule.name == "adamw":
            betas = (rule.beta1, rule.beta2)
            optimizer = torch.optim.AdamW(groups, betas=betas, eps=rule.epsilon, fused=True)
        else:
            optimizer = torch.optim.SGD(groups, momentum=rule.momentum, fused=True)
            names = ("momentum_buffer",)
        for group, mine in zip(groups, moments, strict=True):
            state = dict(zip(names, mine, strict=False))  # without momentum there is none
            if rule.name == "adamw":
                state["step"] = torch.tensor(float(self.applied - 1))
            optimizer.state[group["params"][0]] = state
        optimizer.step()

    def _errors(self, magnitudes: Sequence[Tensor]) -> list[Tensor]:
        """The `e` of every layer, in fp64; zero where sums have the same order."""
        unit = torch.finfo(self._gradient_dtype).eps / 2
        errors = []
        for layer, magnitude in enumerate(magnitudes):
            uses = 2 if self._graph.tied and layer == 0 else 1
            terms = uses * self._graph.micro_batches * self._graph.strategy.shards
            exact = same_order(self._graph, layer, self._layers[layer])
            split = self._graph.strategy.tp * self._graph.strategy.cp > 1
            within = self.rounding * magnitude.max() if split and len(magnitude) else 0.0
            errors.append(magnitude * (0.0 if exact else 2 * terms * unit) + 2 * within)
        return errors

    @property
    def rounding(self) -> float:
        """How far off roundings within a micro-batch may lead, of the largest element."""
        unit = torch.finfo(self._dtype).eps / 2
        return LAMBDA * sqrt(_roundings(self._plan)) * unit

    def _norm_error(self, gradients: Sequence[Tensor], errors: Sequence[Tensor]) -> float:
        """How far off the norm may be, as a fraction of it."""
        largest = max(gradient.numel() for gradient in gradients)
        return (largest / 2 + 2) * UNIT + _norm(errors) / _norm(gradients)

    def _clips(self) -> bool:
        """Whether the clip factor may differ from one on either side."""
        limit = self._plan.training.clip_norm
        return limit is not None and limit < INACTIVE

    def _rates(self, layer: int, rate: float) -> Tensor:
        """The learning rate of every element of the layer, in fp64."""
        rates = [
            torch.full((torch.Size(p.shape).numel(),), rate * rule.learning_rate_factor).double()
            for p in self._kinds()[layer]
            for rule in [self._rules[layer][p.name]]
        ]
        return torch.cat(rates)

    def _through_adamw(
        self, layer: int, old: LayerState, g: Tensor, error: Tensor, rate: float
    ) -> Bound:
        rule, t = self._plan.training.optimizer, self.applied
        m, v = (moment.double() for moment in old.moments)
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
        move = change + rounding * term_m / unbias_m / smallest
        return Bound(
            self._rates(layer, rate) * move + rounding * old.weights.double().abs(),
            (
                by_m * error + rounding * term_m,
                by_v * error * (2 * g.abs() + error) + rounding * new_v,
            ),
        )

    def _through_sgd(
        self, layer: int, old: LayerState, g: Tensor, error: Tensor, rate: float
    ) -> Bound:
        rule, w = self._plan.training.optimizer, old.weights.double().abs()
        decay = max(rule.weight_decay, *(group.weight_decay or 0.0 for group in rule.groups), 0.0)
        term = g.abs() + decay * w
        if old.moments:
            term += rule.momentum * old.moments[0].double().abs()
        change = error + 8 * UNIT * term
        weights = self._rates(layer, rate) * change + 8 * UNIT * w
        return Bound(weights, (change,) * len(old.moments))


@dataclass(frozen=True, slots=True)
class _Summed:
    """Sums of one layer's gradients and of their magnitudes, by name."""

    sums: dict[str, Tensor]
    magnitudes: dict[str, Tensor]

    @classmethod
    def of(cls, total: Tensor, parameters: Sequence[Parameter], magnitude: Tensor) -> _Summed:
        """Views of the flat sums."""
        names = [p.name for p in parameters]
        parts = (_split(flat, parameters) for flat in (total, magnitude))
        sums, magnitudes = (dict(zip(names, part, strict=True)) for part in parts)
        return cls(sums, magnitudes)

    def linears(
        self, p: Mapping[str, Tensor], names: tuple[str, ...], x: Tensor
    ) -> tuple[Tensor, ...]:
        """As plain_linears; the gradients of the weights are added here."""
        factors = [
            products.Factor(
                p[f"{name}.weight"].detach(),
                p.get(f"{name}.bias"),
                partial(self.add, f"{name}.weight"),
            )
            for name in names
        ]
        return products.linears(x, factors)

    def embedding(
        self, p: Mapping[str, Tensor], tokens: Tensor, model: ModelSpec, begins: Tensor | None
    ) -> Tensor:
        """As blocks.embedding; a micro-batch's rows are added up in fp32, then to the sums."""
        tables = {name: t.detach() for name, t in p.items()}
        x = blocks.embedding(tables, tokens, model, begins=begins)
        looked_up = blocks.looked_up(tokens, model, begins=begins)

        def add(gradient: Tensor) -> None:
            self._look_up(looked_up, blocks.scaled(gradient, model))

        x.requires_grad_().register_hook(add)  # type: ignore[no-untyped-call]
        return x

    def rows(self, name: str, p: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Rows of one table, whose gradients are added up likewise."""
        rows = F.embedding(tokens, p[name].detach())

        def add(gradient: Tensor) -> None:
            self._look_up({name: tokens.flatten()}, gradient)

        rows.requires_grad_().register_hook(add)  # type: ignore[no-untyped-call]
        return rows

    def _look_up(self, tables: Mapping[str, Tensor], gradient: Tensor) -> None:
        for name, rows in tables.items():
            sums = self.sums[name]
            dense = torch.zeros(sums.shape).index_add_(0, rows, gradient.flatten(0, 1).float())
            sums += dense.to(sums.dtype)
            self.magnitudes[name] += dense.double().abs()

    def add(self, name: str, gradient: Tensor, x: Tensor) -> None:
        """Add the product of a weight's gradient and input."""
        self.put(name, gradient.float().T @ x.float())

    def put(self, name: str, product: Tensor) -> None:
        """Add a weight's gradient by one micro-batch."""
        self.sums[name] += product
        self.magnitudes[name] += product.double().abs()


@dataclass(frozen=True, slots=True)
class _SummedExperts:
    """The same for what experts add."""

    _sums: _Summed

    def add_product(self, name: str, gradient: Tensor, x: Tensor) -> None:
        """As a product's."""
        self._sums.add(name, gradient, x)

    def add_by(self, name: str, add: Adds) -> None:
        """What is added, alone."""
        product = torch.empty_like(self._sums.sums[name])
        add(product, fresh=True)
        self._sums.put(name, product)


def _roundings(plan: Plan) -> int:
    """The lengths of all sums that a gradient may depend on, one after the other."""
    model, length = plan.model, plan.training.sequence_length
    found = 0
    for layer in model.layer_sequence():
        for step in model.steps(layer):
            reads, gives = (sum(v.columns() for v in each) for each in (step.reads, step.gives))
            match step.op:
                case StepOp.PRODUCT:
                    found += reads + gives
                case StepOp.NORM:
                    found += 2 * step.reads[0].each if step.reads[0].split else 2 * reads
                case StepOp.ATTENTION:
                    found += 2 * (length + model.head_dim)
                case StepOp.LOSS:
                    found += reads
    return found + plan.strategy.micro_batch * length  # of tokens, by weights


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


def _filled(tensor: Tensor) -> Tensor:
    """A flat copy of whole vectors, with zeros behind."""
    return F.pad(tensor.flatten(), (0, -tensor.numel() % VECTOR))


def _tensors(
    leaf: Tensor, parameters: Sequence[Parameter], dtype: torch.dtype, magnitude: Tensor
) -> dict[str, Tensor]:
    """A layer's tensors in the compute dtype; their gradients' magnitudes are added up."""
    tensors = {}
    for p, part, sums in zip(
        parameters, _split(leaf, parameters), _split(magnitude, parameters), strict=True
    ):
        tensor = part.to(dtype)
        if p.constant:
            tensors[p.name] = tensor.detach()
            continue

        def add(gradient: Tensor, sums: Tensor = sums) -> None:
            sums.add_(gradient.detach().double().abs())

        tensor.register_hook(add)  # type: ignore[no-untyped-call]
        tensors[p.name] = tensor
    return tensors
