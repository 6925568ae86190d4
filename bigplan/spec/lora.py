"""LoRA: small trained matrices beside products of frozen ones (Hu et al., arXiv 2106.09685).

y = x W^T + s (x A^T) B^T, with A [rank, in] and B [out, rank], which begins as zeros. W and all
other parameters of the model are frozen: in the compute dtype, without gradient or state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError, quoted
from bigplan.spec.files.document import Spec
from bigplan.spec.files.words import did_you_mean
from bigplan.spec.four_bits import BLOCK, is_packed, packed_columns
from bigplan.spec.layers import ROUTER, SHARED_GATE
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import LayerStep, Parameter, Split, StepOp

HIGHEST_RANK = 1024
_WEIGHT = ".weight"


def _twice_the_rank(data: dict[str, int]) -> float:
    return 2.0 * data["rank"]


class LoraRequest(Spec):
    """The `lora:` part as the user writes it: with `weights` all else is optional."""

    rank: int | None = Field(default=None, gt=0, le=HIGHEST_RANK)
    """columns between A and B; default: that of `weights`"""
    alpha: float | None = Field(default=None, gt=0)
    """adapters count alpha / rank; default: that of `weights`, or 2 x rank"""
    targets: tuple[str, ...] | None = None
    """products with an adapter, such as [q_proj, v_proj]; default: those of `weights`, or all"""
    rank_stabilised: bool | None = None
    """adapters count alpha / sqrt(rank) in place of alpha / rank; default: as `weights`, or no"""
    frozen: Literal["nf4"] | None = None
    """how the blocks' frozen matrices are stored: nf4 in 4 bits (QLoRA); null: in `precision`"""
    weights: str | None = Field(default=None, min_length=1)
    """peft's folder of adapters to start from; default: new ones, which change nothing at first"""

    @model_validator(mode="after")
    def _check(self) -> LoraRequest:
        if self.rank is None and self.weights is None:
            raise InputError(
                "lora has no rank; write one, such as 16, or `weights` with a folder of adapters"
            )
        return self


class Lora(Spec):
    """Low-rank adapters of the blocks' products; nothing else of the model is trained."""

    rank: int = Field(gt=0, le=HIGHEST_RANK)
    """columns between A and B"""
    alpha: float = Field(default_factory=_twice_the_rank, gt=0)
    """adapters count alpha / rank; default: 2 x rank"""
    targets: tuple[str, ...] | None = None
    """products with an adapter, such as [q_proj, v_proj]; default: all of the model's blocks"""
    rank_stabilised: bool = False
    """adapters count alpha / sqrt(rank) in place of alpha / rank"""
    frozen: Literal["nf4"] | None = None
    """how the blocks' frozen matrices are stored: nf4 in 4 bits (QLoRA); null: in `precision`"""
    weights: str | None = Field(default=None, min_length=1, exclude_if=lambda weights: not weights)
    """peft's folder of adapters to start from; null: new ones"""

    @property
    def scale(self) -> float:
        """What an adapter's result is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilised else self.rank)


def targets_of(model: ModelSpec) -> tuple[str, ...]:
    """Names of the products of the model's blocks that adapters may have, as in a forward."""
    products = (step for step in model.steps("block") if step.op is StepOp.PRODUCT)
    return tuple(_module(matrix) for step in products for matrix in _adaptable(step))


def adapted_steps(model: ModelSpec, kind: str, lora: Lora | None) -> tuple[LayerStep, ...]:
    """What one layer of a kind does where adapters are trained; None: all of the model is.

    A frozen matrix has no gradient, so a product's input is kept only if an adapter reads it.
    """
    steps = model.steps(kind)
    return steps if lora is None else _adapted(steps, kind == "block", lora)


def adapters(model: ModelSpec, lora: Lora | None) -> tuple[Parameter, ...]:
    """The trained matrices of one block, in the order of a forward; none without `lora`."""
    return tuple(p for step in adapted_steps(model, "block", lora) for p in step.adapters)


def stored(model: ModelSpec, kind: str, lora: Lora | None, element: int) -> tuple[Parameter, ...]:
    """The model's parameters of one layer of a kind as they are stored, in elements of that size.

    In 4 bits a matrix of a block has rows as ever, and the packed columns of each.
    """
    parameters = model.kinds()[kind]
    if lora is None or lora.frozen is None or kind != "block":
        return parameters
    return _packed(parameters, element)


@lru_cache(maxsize=64)  # asked at every pass of a layer
def _packed(parameters: tuple[Parameter, ...], element: int) -> tuple[Parameter, ...]:
    return tuple(
        replace(p, shape=(p.shape[0], packed_columns(p.shape[1], element))) if is_packed(p) else p
        for p in parameters
    )


def packs(model: ModelSpec, lora: Lora | None, tp: int) -> bool:
    """Whether each of `tp` ranks has whole blocks of 4-bit elements in every row."""
    if lora is None or lora.frozen is None:
        return True
    return all(
        parameter.local(tp)[1] % BLOCK == 0
        for parameter in model.kinds()["block"]
        if is_packed(parameter)
    )


def trained(model: ModelSpec, kind: str, lora: Lora | None) -> tuple[Parameter, ...]:
    """The trained parameters of one layer of a kind: adapters, or all of it without `lora`."""
    if lora is None:
        return model.kinds()[kind]
    return adapters(model, lora) if kind == "block" else ()


def trained_count(model: ModelSpec, lora: Lora | None) -> int:
    """Elements of the whole model that are trained."""
    if lora is None:
        return model.parameter_count
    return model.layers * sum(parameter.count for parameter in adapters(model, lora))


@lru_cache(maxsize=256)
def _adapted(steps: tuple[LayerStep, ...], block: bool, lora: Lora) -> tuple[LayerStep, ...]:
    return tuple(_frozen(step, lora, block) for step in steps)


def _frozen(step: LayerStep, lora: Lora, block: bool) -> LayerStep:
    if step.op is StepOp.PRODUCT:
        return _with_adapters(step, lora, block)
    if step.op is StepOp.ROUTE:  # what it sends is read again for gradients of experts alone
        return replace(step, saves=tuple(v for v in step.saves if v != step.reads[0]))
    return step


def _with_adapters(step: LayerStep, lora: Lora, block: bool) -> LayerStep:
    """A product with its adapters: all A, then all B, so that one product with all A is enough."""
    wanted = [
        matrix
        for matrix in _adaptable(step)
        if block and (lora.targets is None or _module(matrix) in lora.targets)
    ]
    pairs = [_pair(matrix, lora.rank) for matrix in wanted]
    flat = (*(a for a, _ in pairs), *(b for _, b in pairs))
    return replace(step, adapters=flat, saves=step.saves if pairs else ())


def _adaptable(step: LayerStep) -> Iterator[Parameter]:
    """The matrices that may have adapters: not experts', which have rows of some tokens alone."""
    matrices = (p for p in step.parameters if p.name.endswith(_WEIGHT))
    return (
        matrix
        for matrix in matrices
        if not matrix.experts and matrix.name not in (ROUTER, SHARED_GATE)
    )


def _module(matrix: Parameter) -> str:
    return matrix.name.removesuffix(_WEIGHT)


def _pair(matrix: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    """A and B of a matrix.

    Where ranks split the matrix by rows, each has its rows of B and all of A; where they split it
    by columns, its columns of A and all of B. So adapters need no further sum over ranks. Where
    each rank has the whole matrix, it has all of both.
    """
    (rows, columns), module, split = matrix.matrix, _module(matrix), matrix.split
    down: Split = "columns" if split == "columns" else "replicated"
    up: Split = "rows" if split == "rows" else "replicated"
    first = Parameter(f"{module}.lora_A", (rank, columns), down, True)
    return first, Parameter(f"{module}.lora_B", (rows, rank), up, True, heads=matrix.heads)


def check_lora(lora: Lora, model: ModelSpec) -> None:
    """Raise InputError where the model has none of the targets, or blocks of several kinds."""
    if model.dense_blocks:
        raise InputError(
            "lora: adapters are not planned where some blocks have no experts, and the first "
            f"{model.dense_blocks} of {model.name} have none; leave `lora` out, or use a model "
            "whose blocks are alike"
        )
    if model.convolution is not None:
        raise InputError(
            "lora: adapters are not planned where blocks mix tokens by a convolution, and some of "
            f"{model.name} do; leave `lora` out, or use a model with attention in all blocks"
        )
    if model.delta_rule is not None or model.attention_gate:
        raise InputError(
            "lora: adapters are not planned where blocks have a gated delta rule or attention "
            f"behind a gate, as some of {model.name}; leave `lora` out, or use another model"
        )
    if model.state_space is not None:
        raise InputError(
            "lora: adapters are not planned where blocks have a state space, as some of "
            f"{model.name}; leave `lora` out, or use another model"
        )
    if not packs(model, lora, 1):
        widths = sorted({p.shape[1] for p in model.kinds()["block"] if is_packed(p)})
        raise InputError(
            f"lora.frozen nf4 stores {BLOCK} elements of a row with one scale, and rows "
            f"of {model.name} have {', '.join(map(str, widths))}, which do not all divide by it; "
            "leave `frozen` out"
        )
    known = targets_of(model)
    if lora.targets is None:
        return
    if not lora.targets:
        raise InputError(f"lora.targets is empty; name some of {', '.join(known)}, or leave it out")
    for target in lora.targets:
        if target not in known:
            hint = did_you_mean(target, known)
            experts = "; experts and routers stay as they are" if model.experts else ""
            raise InputError(
                f"lora.targets has {quoted(target)}, but blocks of {model.name} have no such "
                f"product{hint}; they have {', '.join(known)}{experts}"
            )
    if len(set(lora.targets)) < len(lora.targets):
        raise InputError("lora.targets names a product twice; name each once")
