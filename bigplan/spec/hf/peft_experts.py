"""Adapters of experts in a folder as Hugging Face's peft writes it (`target_parameters`).

transformers 5 has all experts of a block in one module, with a parameter gate_up_proj and another
down_proj. peft (0.21, tuners/lora/layer.py, `ParamWrapper`) has an A [experts x rank, in] and a B
[out, rank x experts] of each: rows of A are expert after expert, and in columns of B experts take
turns. It wraps the module once for each parameter, the later one around the earlier, so that
gate_up_proj's tensors are called MODULE.base_layer.lora_A.weight where down_proj has some, too.
Experts without a gate (Nemotron 3) have a parameter up_proj in its place.

Gate and up are matrices of their own here. One adapter of our rank becomes one of each, which have
the same A; bigplan exports one of twice the rank.

With transformers 4 each expert's matrix was a module, as files have them, with an A [rank, in] and
a B [out, rank] of its own. These are read, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bigplan.errors import InputError, RefusedError
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.weights import Stored, stored
from bigplan.spec.lora import OF_SENT, RETURNING
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter

PREFIX = "base_model.model."  # of all modules in peft's files
# What files call modules that transformers 5 has by other names.
_RENAMED = {".block_sparse_moe.": ".mlp."}
_OF_GRANITE = ".input_linear.weight"  # beside its router; there transformers 5 has `experts`


class ExpertPlace(NamedTuple):
    """The adapters of one of experts' matrices within those of a parameter.

    `above`, `run` and `cycle`: where an expert's rows of the matrix are in those of the parameter.
    Of `width` rows of every expert's A, and columns of its B, they have some from `first` on.
    """

    layer: int  # its index in layer_sequence()
    target: str
    module: str  # what names of tensors begin with
    name: str  # the parameter's within it
    matrix: Parameter
    above: int
    run: int
    cycle: int
    width: int = 0
    first: int = 0

    @property
    def parameter(self) -> str:
        """The parameter's name in the model."""
        return f"{self.module.removesuffix('.base_layer')}.{self.name}"

    @property
    def returns(self) -> bool:
        """Whether the matrix leads back to the residual stream."""
        return self.target == RETURNING


class SeparateExperts(NamedTuple):
    """The adapters of one of experts' matrices, of which each expert's is a module."""

    layer: int  # its index in layer_sequence()
    target: str
    modules: tuple[str, ...]  # by expert
    matrix: Parameter

    @property
    def returns(self) -> bool:
        """Whether the matrix leads back to the residual stream."""
        return self.target == RETURNING


def matrices_of(model: ModelSpec) -> Mapping[str, tuple[str, ...]]:
    """The parameters of a module of experts in transformers, and the matrices that each has.

    In the order in which peft wraps them.
    """
    if not model.gated:
        return {"up_proj": OF_SENT[1:], "down_proj": (RETURNING,)}
    return {"gate_up_proj": OF_SENT, "down_proj": (RETURNING,)}


def separate_places(
    path: Path,
    family: str,
    model: ModelSpec,
    layer: int,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
) -> Iterator[SeparateExperts]:
    """Those of a layer that have values.

    Raises InputError for shapes that are not the model's, RefusedError where experts have none.
    """
    for target in (one for targets in matrices_of(model).values() for one in targets):
        every, matrix = _stored(family, model, layer, target), _matrix(model, layer, target)
        modules = tuple(PREFIX + one.tensor.removesuffix(".weight") for one in every)
        have = [module for module in modules if f"{module}.lora_A.weight" in shapes]
        if every[0].stacked or not have:
            continue
        if len(have) < len(modules):
            raise RefusedError(
                f"{path}: {len(have)} of {len(modules)} experts of block {layer - 1} have adapters "
                f"of {target}; bigplan trains those of all; start from others"
            )
        read, given = matrix.shape[1], matrix.shape[0] // matrix.experts
        if target == RETURNING:
            read, given = given, read
        for module in modules:
            for side, shape in (("A", (rank, read)), ("B", (given, rank))):
                if (found := shapes.get(f"{module}.lora_{side}.weight")) != shape:
                    raise InputError(
                        f"{path}: lora_{side} of {module.removeprefix(PREFIX)} has the shape "
                        f"{list(found or ())}, but the model needs {list(shape)}; these adapters "
                        "are of another model, or of several ranks"
                    )
        yield SeparateExperts(layer, target, modules, matrix)


def expert_module(family: str, model: ModelSpec, layer: int) -> str:
    """The module of a layer's experts in transformers."""
    (first, *_) = _stored(family, model, layer, OF_SENT[-1])
    if first.tensor.endswith(_OF_GRANITE):
        return first.tensor.removesuffix(_OF_GRANITE) + ".experts"
    module = first.tensor.rpartition(".experts.")[0] + ".experts"
    for old, new in _RENAMED.items():
        module = module.replace(old, new)
    return module


def expert_places(
    family: str, model: ModelSpec, layer: int, *, nested: bool, prefix: str = ""
) -> tuple[ExpertPlace, ...]:
    """Where adapters of a layer's experts would be. `nested`: both parameters have some."""
    module, every = prefix + expert_module(family, model, layer), matrices_of(model)
    first = next(iter(every))
    return tuple(
        _place(family, model, layer, target, (f"{module}.base_layer" if inside else module, name))
        for name, targets in every.items()
        for inside in [nested and name == first]
        for target in targets
    )


def _stored(family: str, model: ModelSpec, layer: int, target: str) -> tuple[Stored, ...]:
    layout = FAMILIES[family].in_transformers
    return stored(family, model, layer, _matrix(model, layer, target), layout)


def _matrix(model: ModelSpec, layer: int, target: str) -> Parameter:
    parameters = model.kinds()[model.layer_sequence()[layer]]
    return next(p for p in parameters if p.name == f"{target}.weight")


def _place(
    family: str, model: ModelSpec, layer: int, target: str, named: tuple[str, str]
) -> ExpertPlace:
    """`named`: the module and the parameter within it."""
    matrix = _matrix(model, layer, target)
    rows = matrix.shape[0] // matrix.experts
    if target == RETURNING:
        return ExpertPlace(layer, target, *named, matrix, 0, matrix.shape[1], matrix.shape[1])
    (one, *_) = _stored(family, model, layer, target)
    if one.stacked and one.cycle:
        return ExpertPlace(layer, target, *named, matrix, one.above, one.run, one.cycle)
    beside = matrices_of(model)[named[1]]
    above = rows * beside.index(target)
    return ExpertPlace(layer, target, *named, matrix, above, rows, len(beside) * rows)


def parameters_told(model: ModelSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters of experts that have adapters, as adapter_config.json says."""
    told = config.get("target_parameters")
    names = [str(name) for name in told] if isinstance(told, list) else []
    every = matrices_of(model)
    return tuple(p for p in every if any(n == p or n.endswith(f".{p}") for n in names))


def found_places(
    folder: Path,
    every: tuple[ExpertPlace, ...],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    targets: object,
) -> Iterator[ExpertPlace]:
    """Those of a layer that have values, each with its part of its tensors."""
    for name in dict.fromkeys(place.name for place in every):
        inside = [place for place in every if place.name == name]
        if f"{inside[0].module}.lora_A.weight" not in shapes:
            continue
        most = rank * len(inside)
        width = _width(folder, inside, shapes)
        if width != rank * len(inside) and isinstance(targets, list | tuple):
            inside = [place for place in inside if place.target in targets]
        if width not in (rank, most):
            raise RefusedError(
                f"{folder}: {name} of {inside[0].module} has the rank {width} and r is "
                f"{rank}; bigplan has adapters of one rank"
            )
        for number, place in enumerate(inside):
            yield place._replace(width=width, first=0 if width == rank else number * rank)


def _width(folder: Path, inside: list[ExpertPlace], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of every expert's A. Raises InputError where shapes are not the model's."""
    place = inside[0]
    experts, hidden = place.matrix.experts, place.matrix.shape[1]
    inner = place.matrix.shape[0] // experts
    read, given = (inner, hidden) if place.returns else (hidden, place.cycle // place.run * inner)
    rows = shapes[f"{place.module}.lora_A.weight"][0]
    width = rows // experts
    for side, shape in (("A", (width * experts, read)), ("B", (given, width * experts))):
        if (found := shapes.get(f"{place.module}.lora_{side}.weight")) != shape:
            raise InputError(
                f"{folder}: lora_{side} of {place.module} has the shape {list(found or ())}, but "
                f"the model's {experts} experts need {list(shape)}; these adapters are of another "
                "model"
            )
    return width
