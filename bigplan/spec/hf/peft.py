"""Adapters in a folder as Hugging Face's peft writes it, found to be those of a model.

`adapter_config.json` has rank, alpha and what they apply to; `adapter_model.safetensors` an A and a
B for each module, called base_model.model.MODULE.lora_A.weight and lora_B.weight
(https://huggingface.co/docs/peft/developer_guides/checkpoint). Only names and shapes are read here.

Some families keep several of our matrices in one module, such as GPT-2's c_attn. Its one adapter of
our rank becomes one of each matrix, which have the same A. One of k times the rank is what
bigplan exports: the A's of k matrices below each other, and of B each matrix's rows with its own
columns alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from bigplan.errors import InputError, RefusedError
from bigplan.paths import is_file
from bigplan.spec.files.reading import parse_json, read_json, require_regular, user_path
from bigplan.spec.hf.config import to_hf_config
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.peft_experts import (
    PREFIX,
    ExpertPlace,
    SeparateExperts,
    expert_places,
    found_places,
    parameters_told,
    separate_places,
)
from bigplan.spec.hf.weights import Stored, family_of, stored
from bigplan.spec.layers import BLOCKS
from bigplan.spec.lora import HIGHEST_RANK, RETURNING, Lora, possible_targets, targets_of
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "training.lora.weights"
_WEIGHT = ".weight"
_MOST_HEADER = 100 << 20  # bytes, as safetensors has it
_METADATA = "__metadata__"
EXPORTED = "bigplan_adapters"  # in safetensors' metadata: which checkpoint's adapters these are


class AdapterPlace(NamedTuple):
    """One matrix's adapter within a module's: rows of its A and columns of its B from `first` on.

    `rows`: where the matrix's rows are in the module's.
    """

    layer: int  # its index in layer_sequence()
    target: str
    module: str
    rows: Stored
    matrix: Parameter
    first: int = 0


Place = AdapterPlace | ExpertPlace | SeparateExperts


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What a folder has of a model."""

    lora: Lora
    places: tuple[Place, ...]
    shapes: Mapping[str, tuple[int, ...]]  # by tensor

    @property
    def settings(self) -> dict[str, Any]:
        """What it says of keys of `training.lora`."""
        return {
            "rank": self.lora.rank,
            "alpha": self.lora.alpha,
            "targets": self.lora.targets,
            "rank_stabilised": self.lora.rank_stabilised,
        }


def adapted_family(model: ModelSpec, weights: str | None) -> str:
    """Whose modules are adapted: those of the first weights, or of what is exported whole."""
    if weights is None:
        return str(to_hf_config(model)["model_type"])
    return family_of(user_path(weights), model)


def started_from(
    stated: Mapping[str, Any], model: ModelSpec, weights: str | None
) -> dict[str, Any]:
    """Keys of `training.lora` with those that its folder says; both have to say the same.

    A plan may be meant for another machine: where the folder is not here, `rank` has to be stated.
    Dropout is no part of adapters: what is stated goes before what the folder says.
    Raises InputError, and RefusedError for adapters of other kinds.
    """
    stated = {key: value for key, value in stated.items() if value is not None}
    folder = user_path(stated["weights"])
    if not is_file(folder / CONFIG) and "rank" in stated:
        return stated
    found = adapter_folder(folder, model, weights, stated.get("targets"))
    check_same(found, stated, folder)
    return {"dropout": found.lora.dropout, **found.settings, **stated}


def check_same(found: AdapterFolder, stated: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError where keys of `training.lora` are not what the folder says."""
    for key, theirs in found.settings.items():
        ours = stated.get(key, theirs)
        if (set(ours) != set(theirs)) if key == "targets" else ours != theirs:
            raise InputError(
                f"lora.{key} is {_told(ours)}, but the adapters in {folder} have {_told(theirs)}; "
                f"leave {key} out, or start from others"
            )


def _told(value: object) -> str:
    return ", ".join(value) if isinstance(value, list | tuple) else str(value)


def adapter_folder(
    folder: Path, model: ModelSpec, weights: str | None, targets: object = None
) -> AdapterFolder:
    """The folder's adapters, whose names and shapes are those of `model`.

    `targets`: those wanted, where a module does not tell of which of its matrices it has some.
    """
    config, header = _config(folder), _header(folder / WEIGHTS)
    shapes = _shapes(header, folder / WEIGHTS)
    _refuse_merged(header, folder, weights)
    family, rank = adapted_family(model, weights), int(_number(folder, config, "r"))
    every, of_experts = tuple(_places(model, family, shapes)), _of_experts(model, family, config)
    separate = tuple(
        place
        for layer, kind in _blocks(model)
        if RETURNING in possible_targets(model, [kind])
        for place in separate_places(folder / WEIGHTS, family, model, layer, shapes, rank)
    )
    alone = {module for place in separate for module in place.modules}
    modules = {p.module for p in every} | {p.module for layer in of_experts for p in layer} | alone
    _check_known(folder, model, modules, shapes)
    if rank > HIGHEST_RANK:
        raise RefusedError(
            f"{folder / CONFIG}: r is {rank}; ranks up to {HIGHEST_RANK} are trained"
        )
    chosen: tuple[Place, ...] = (
        *separate,
        *_placed(folder, every, shapes, rank, targets),
        *(
            place
            for layer in of_experts
            for place in found_places(folder / WEIGHTS, layer, shapes, rank, targets)
        ),
    )
    wanted = _targets_of_all_blocks(folder, model, chosen)
    ranks = {p.module: shapes[f"{p.module}.lora_A.weight"][0] for p in every}
    ranks |= dict.fromkeys(alone, rank)
    ranks |= {p.parameter: p.width for p in chosen if isinstance(p, ExpertPlace)}
    lora = Lora(
        rank=rank,
        alpha=_alpha(folder, config, ranks),
        targets=tuple(target for target in possible_targets(model) if target in wanted),
        rank_stabilised=bool(config.get("use_rslora")),
        dropout=_dropout(folder, config),
    )
    return AdapterFolder(lora, chosen, shapes)


def _targets_of_all_blocks(
    folder: Path, model: ModelSpec, places: Collection[Place]
) -> frozenset[str]:
    """What has adapters. Raises RefusedError where some blocks that could have them do not."""
    found = frozenset(place.target for place in places)
    needed = {(n, t) for n, kind in _blocks(model) for t in possible_targets(model, [kind])}
    if {(p.layer, p.target) for p in places} != {one for one in needed if one[1] in found}:
        raise RefusedError(
            f"{folder / WEIGHTS}: not all {model.layers} blocks of {model.name} have the same "
            "adapters, which bigplan trains; start from others"
        )
    return found


def _check_known(
    folder: Path, model: ModelSpec, modules: Collection[str], shapes: Collection[str]
) -> None:
    """Raise RefusedError where a tensor is of none of these modules."""
    known = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    if other := next((name for name in sorted(shapes) if name not in known), None):
        raise RefusedError(
            f"{folder / WEIGHTS}: {other} is no adapter of a product of {model.name}'s blocks, "
            f"which are {', '.join(possible_targets(model))}; train without it, or start "
            "from others"
        )


def _places(
    model: ModelSpec, family: str, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[AdapterPlace]:
    """All matrices whose module has an adapter."""
    kinds = {kind: {p.name: p for p in of} for kind, of in model.kinds().items()}
    layout = FAMILIES[family].in_transformers
    for layer, kind in _blocks(model):
        for target in targets_of(model, [kind]):
            matrix = kinds[kind][f"{target}{_WEIGHT}"]
            (rows,) = stored(family, model, layer, matrix, layout)
            module = PREFIX + rows.tensor.removesuffix(_WEIGHT)
            if f"{module}.lora_A.weight" in shapes:
                yield AdapterPlace(layer, target, module, rows, matrix)


def _of_experts(
    model: ModelSpec, family: str, config: Mapping[str, Any]
) -> tuple[tuple[ExpertPlace, ...], ...]:
    """Where adapters of each block's experts are, as far as the folder says that it has some."""
    told = parameters_told(model, config)
    return tuple(
        tuple(
            place
            for place in expert_places(family, model, layer, nested=len(told) > 1, prefix=PREFIX)
            if place.parameter.rpartition(".")[2] in told
        )
        for layer, kind in (_blocks(model) if told else ())
        if RETURNING in possible_targets(model, [kind])
    )


def _blocks(model: ModelSpec) -> Iterator[tuple[int, str]]:
    """The numbers of all blocks among layers, and their kinds."""
    return ((n, kind) for n, kind in enumerate(model.layer_sequence()) if kind in BLOCKS)


def _placed(
    folder: Path,
    places: tuple[AdapterPlace, ...],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    targets: object,
) -> Iterator[AdapterPlace]:
    """Those that have values, each with its columns in its module."""
    for module, grouped in groupby(sorted(places, key=_order), lambda place: place.module):
        inside = list(grouped)
        columns, rows = inside[0].matrix.shape[1], sum(p.matrix.shape[0] for p in inside)
        width = shapes[f"{module}.lora_A.weight"][0]
        for side, shape in (("A", (width, columns)), ("B", (rows, width))):
            if (found := shapes.get(f"{module}.lora_{side}.weight")) != shape:
                raise InputError(
                    f"{folder / WEIGHTS}: lora_{side} of {module.removeprefix(PREFIX)} has the "
                    f"shape {list(found or ())}, but the model needs {list(shape)}; these adapters "
                    "are of another model"
                )
        names = ", ".join(place.target for place in inside)
        if width != rank * len(inside) and isinstance(targets, list | tuple):
            inside = [place for place in inside if place.target in targets]
        if width == rank:
            yield from inside
            continue
        if width != rank * len(inside):
            raise RefusedError(
                f"{folder / WEIGHTS}: {module.removeprefix(PREFIX)} has the rank {width} and "
                f"r is {rank}; bigplan has adapters of one rank. If it is of some of {names} "
                "alone, say of which in lora.targets"
            )
        for number, place in enumerate(inside):
            yield place._replace(first=number * rank)


def _order(place: AdapterPlace) -> tuple[str, int]:
    return place.module, place.rows.above


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not is_file(path):
        raise InputError(
            f"{KEY}: {folder} has no {CONFIG}; name a folder that peft or `bigplan export` wrote, "
            "or leave it out to start with new adapters"
        )
    config = read_json(path).data
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA" or config.get("use_dora"):
        told = "DoRA" if kind == "LORA" else f"peft_type {kind}"
        raise RefusedError(f"{path}: has {told}, and LoRA alone is trained; start from others")
    if not is_file(folder / WEIGHTS):
        raise InputError(
            f"{KEY}: {folder} has no {WEIGHTS}; write the adapters as safetensors, with peft's "
            "save_pretrained"
        )
    return dict(config)


def _number(folder: Path, config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InputError(f"{folder / CONFIG}: {key} is {value!r}; it has to be a number above 0")
    return value


def _dropout(folder: Path, config: Mapping[str, Any]) -> float:
    rate = config.get("lora_dropout", 0.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise InputError(
            f"{folder / CONFIG}: lora_dropout is {rate!r}; it has to be a number from 0 to below 1"
        )
    return rate


def _alpha(folder: Path, config: Mapping[str, Any], ranks: Mapping[str, int]) -> float:
    """The alpha that goes with `r`. All modules have to count alike."""
    power = 0.5 if config.get("use_rslora") else 1.0
    rank, alpha = _number(folder, config, "r"), float(_number(folder, config, "lora_alpha"))
    pattern = config.get("alpha_pattern")
    pattern = pattern if isinstance(pattern, dict) else {}
    for module, width in ranks.items():
        ends = (end for end in pattern if f".{module}".endswith(f".{end.removesuffix(_WEIGHT)}"))
        end = next(ends, None)
        mine = alpha if end is None else _number(folder, pattern, end)
        if not math.isclose(mine / width**power, alpha / rank**power, rel_tol=1e-6):
            raise RefusedError(
                f"{folder / CONFIG}: {module.removeprefix(PREFIX)} counts {mine} / {width} and "
                f"others {alpha} / {rank}; bigplan's adapters all count alike"
            )
    return alpha


def _refuse_merged(header: Mapping[str, Any], folder: Path, weights: str | None) -> None:
    """Raise InputError where the first weights have these very adapters added already.

    Exports of one checkpoint say which it was; of other files nothing is known.
    """
    if weights is None or not (exported := _exported(header)):
        return
    for path in sorted(user_path(weights).glob("*.safetensors"))[:1]:  # each file says it
        if _exported(_header(path)) == exported:
            raise InputError(
                f"{KEY}: {weights} has the adapters of {folder} added already (`bigplan export "
                "--merged`), so they would count twice; leave them out, or start from the weights "
                "that they were trained on"
            )


def _exported(header: Mapping[str, Any]) -> str:
    metadata = header.get(_METADATA)
    return str(metadata.get(EXPORTED, "")) if isinstance(metadata, dict) else ""


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file begins with: 8 bytes with the length of a JSON text, and that text.

    Raises InputError.
    """
    require_regular(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _MOST_HEADER:
            raise _damaged(path)
        text = file.read(length)
    try:
        header = parse_json(text.decode(), str(path)).data
    except (UnicodeDecodeError, InputError):
        raise _damaged(path) from None
    if not isinstance(header, dict):
        raise _damaged(path)
    return header


def _shapes(header: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that a file's header tells of. Raises InputError."""
    try:
        return {
            name: tuple(map(int, told["shape"]))
            for name, told in header.items()
            if name != _METADATA
        }
    except (KeyError, TypeError, ValueError):
        raise _damaged(path) from None


def _damaged(path: Path) -> InputError:
    return InputError(
        f"{path}: cannot be read as safetensors; it is cut off or damaged: copy it again"
    )
