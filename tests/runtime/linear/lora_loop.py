"""A plain torch loop that trains adapters: no plan, no buffers, autograd and torch.optim alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.content import ADAPTERS
from bigplan.plan import Plan
from bigplan.rectangle import all_of
from bigplan.runtime.data import BatchSource, data_path
from bigplan.runtime.experts.mixture import Mixture
from bigplan.runtime.layers import blocks
from bigplan.runtime.linear import four_bits
from bigplan.runtime.memory.adapter_rows import NAME, adapter_parameters
from bigplan.runtime.mixers import positions
from bigplan.runtime.mixers.ways import Ways
from bigplan.runtime.weights.first_values import stored_values, whole_values
from bigplan.spec.layers import first_block
from bigplan.spec.lora import Lora, stored
from bigplan.spec.step import Parameter
from tests.runtime.handing import Handing, tables_of
from tests.runtime.linear.masks import Drawn


def all_of_it(name: str, x: Tensor) -> Tensor:
    """What an adapter without dropout reads."""
    return x


def plain_ways(
    scale: float, balance: float = 0.0, read: Callable[[str, Tensor], Tensor] = all_of_it
) -> Ways:
    """Products as the formula has them, differentiated by autograd.

    `balance`: what that of a block's experts weighs, over all tokens of a pass. `read`: what a
    target's adapter reads of x.
    """

    def linears(p: Mapping[str, Tensor], names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        outputs = []
        for name in names:
            y = F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
            if f"{name}.lora_A" in p:
                narrow = F.linear(read(name, x), p[f"{name}.lora_A"])
                y = y + scale * F.linear(narrow, p[f"{name}.lora_B"])
            outputs.append(y)
        return tuple(outputs)

    mixture = Mixture(balance=(lambda: balance) if balance else None)
    return Ways(linears, experts=mixture)


def merged_experts(p: Mapping[str, Tensor], experts: int, lora: Lora) -> dict[str, Tensor]:
    """Parameters of a block with experts' adapters added to their matrices, W + s B A each.

    Row j of f is row j of experts' first matrices, and column j of their last.
    """
    found = dict(p)
    for name in ("gate", "up", "down"):
        pair = [f"experts.{name}_proj.lora_{side}" for side in "AB"]
        if pair[0] not in found:
            continue
        narrow, wide = (found.pop(one) for one in (pair[::-1] if name == "down" else pair))
        weight = found[f"experts.{name}_proj.weight"]
        of_rows = wide.reshape(-1, experts, lora.rank), narrow.reshape(lora.rank, experts, -1)
        delta = torch.einsum("fer,reh->feh", *of_rows).reshape(weight.shape)
        found[f"experts.{name}_proj.weight"] = weight + lora.scale * delta
    return found


@dataclass
class LoraLoop:
    """Trains a plan's adapters in fp32 on the CPU, whatever its ranks: a step is one batch."""

    plan: Plan
    frozen: list[dict[str, Tensor]] = field(init=False)  # by layer
    adapters: dict[str, Tensor] = field(init=False)  # by name in the model
    gradients: dict[str, Tensor] = field(init=False)  # of the last step, before clipping
    _step: int = 0

    def __post_init__(self) -> None:
        model, training = self.plan.model, self.plan.training
        first, sequence = stored_values(model, training), model.layer_sequence()
        self.frozen = [
            {p.name: self._matrix(kind, p, whole_values(first, kind, layer, p)) for p in described}
            for layer, kind in enumerate(sequence)
            for described in [stored(model, kind, training.lora, training.compute_bytes)]
        ]
        described = adapter_parameters(model, training.lora, range(len(sequence)))
        self.adapters = {
            p.name: first(NAME, ADAPTERS, p, all_of(p)).clone().requires_grad_() for p in described
        }
        o = training.optimizer
        self._optimizer = torch.optim.AdamW(
            self.adapters.values(),
            lr=o.learning_rate,
            betas=(o.beta1, o.beta2),
            eps=o.epsilon,
            weight_decay=o.weight_decay,
        )
        length, batch = training.sequence_length, training.global_batch
        self._source = BatchSource(data_path(training.data), length, batch, 0, 1, training.seed)

    def _matrix(self, kind: str, described: Parameter, values: Tensor) -> Tensor:
        """What a frozen parameter is in products: matrices in 4 bits have lost some of it."""
        whole = {p.name: p.shape for p in self.plan.model.kinds()[kind]}
        as_it_is = described.shape == whole.get(described.name, described.shape)
        return values if as_it_is else four_bits.unpacked(values).float()

    def step(self) -> float:
        """One step; its loss."""
        batch, clip_norm = self._source.batch(self._step, 0), self.plan.training.clip_norm
        total = self._sum(batch.tokens, batch.targets, self._read) / batch.counted
        self._optimizer.zero_grad()
        torch.autograd.backward(total)
        self.gradients = {n: a.grad.clone() for n, a in self.adapters.items() if a.grad is not None}
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.adapters.values(), clip_norm)
        self._optimizer.step()
        self._step += 1
        return float(total.detach())

    def validated(self) -> float:
        """The mean loss over the validation's batches, which adapters take part in."""
        wanted, training = self.plan.training.validation, self.plan.training
        assert wanted is not None, "the plan has no validation"
        length, batch = training.sequence_length, training.global_batch
        source = BatchSource(
            data_path(wanted.data), length, batch, 0, 1, training.seed, batches=wanted.batches
        )
        every = [source.batch(number, 0) for number in range(source.steps or 0)]
        with torch.no_grad():
            return float(sum(self._sum(one.tokens, one.targets) / one.counted for one in every))

    def _read(self, layer: int, target: str, x: Tensor) -> Tensor:
        """What an adapter reads of x [sequences, s, in] in this step, by masks.py."""
        training = self.plan.training
        assert training.lora is not None
        if not (rate := training.lora.dropout):
            return x
        first, (batch, length, width) = self._step * training.global_batch, x.shape
        drawn = Drawn(training.seed, layer, target)
        kept = drawn.kept(rate, range(first, first + batch), range(length), range(width))
        return x * torch.from_numpy(kept).view(x.shape) / (1 - rate)

    def _sum(
        self,
        tokens: Tensor,
        targets: Tensor,
        read: Callable[[int, str, Tensor], Tensor] = lambda _, __, x: x,
    ) -> Tensor:
        """The losses of all targets."""
        model, lora = self.plan.model, self.plan.training.lora
        assert lora is not None
        balance = model.router_loss / max(1, model.routed_blocks)
        length = tokens.shape[1]
        x = blocks.embedding(self.frozen[0], tokens, model)
        x = blocks.embedding_norm(self.frozen[0], x, model)
        table = tables_of(model, self.frozen)
        rows = None if table is None else F.embedding(tokens, table)
        handing = Handing.begun(model, self.frozen[0], rows, x)
        start = first_block(model.layer_sequence())
        for number in range(model.layers):
            prefix = f"layers.{number}."
            own = {
                n.removeprefix(prefix): a for n, a in self.adapters.items() if n.startswith(prefix)
            }
            seen, attends = model.seen_by(model.block_kinds[number]), model.attentions
            at = positions.position_tables(
                seen, length, "cpu", torch.float32, attends=attends[number]
            )
            p = merged_experts({**self.frozen[start + number], **own}, seen.experts, lora)
            p |= handing.found(number)
            ways = plain_ways(lora.scale, balance, partial(read, start + number))
            x = blocks.block(p, x, seen, at, handing.ways(number, ways))
        head = self.frozen[-1]
        if model.tied_embeddings:
            head = {**head, "embed_tokens.weight": self.frozen[0]["embed_tokens.weight"]}
        return blocks.head_loss(head, x, targets, model)
