"""A checkpoint's adapters as Hugging Face's peft has them, or added to the model that they adapt.

peft's folder has `adapter_config.json` and `adapter_model.safetensors`, whose tensors are called
base_model.model.MODULE.lora_A.weight and lora_B.weight, by the modules of the transformers model
(https://huggingface.co/docs/peft/developer_guides/checkpoint).

Some families keep several of our matrices in one module, such as GPT-2's c_attn. Adapters of k of
them are one adapter of k times the rank: A's below each other, and of B each matrix's rows with
its own columns alone. It gives the same, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from bigplan.content import ADAPTERS
from bigplan.runtime.checkpoint import FoundCheckpoint, Reader, check_frozen
from bigplan.runtime.export.hf import (
    DTYPES,
    METADATA,
    joined,
    write_json,
    write_trained,
    written_whole,
)
from bigplan.runtime.manifest import Manifest
from bigplan.runtime.weights.first_values import (
    first_values,
    frozen_fingerprint,
    whole_values,
)
from bigplan.runtime.weights.peft_experts import exported, products
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.peft import CONFIG, EXPORTED, WEIGHTS, adapted_family
from bigplan.spec.hf.peft_experts import PREFIX, expert_places, matrices_of
from bigplan.spec.hf.weights import HfTensor, hf_tensors
from bigplan.spec.layers import BLOCKS
from bigplan.spec.lora import RETURNING, Lora, adapters, possible_targets, trained_count
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import full_name
from bigplan.spec.step import Parameter

_WEIGHT = ".weight"
# Names of MLPs' matrices. Of a model with experts peft (0.21) takes modules of these names for the
# experts' own, so those of other MLPs are told as parameters (`target_parameters`).
OF_MLPS = ("gate_proj", "up_proj", "down_proj")


class _Adapters:
    """The adapters in a checkpoint, fp32, whole."""

    def __init__(self, reader: Reader, manifest: Manifest) -> None:
        assert manifest.training.lora is not None, "the run trained the whole model"
        self.lora: Lora = manifest.training.lora
        self._reader = reader
        model = manifest.model
        self._kinds = model.layer_sequence()
        self._names = {k: {p.name for p in adapters(model, self.lora, k)} for k in model.kinds()}

    def has(self, target: str) -> bool:
        """Whether some blocks have adapters of this product."""
        return any(f"{target}.lora_A" in names for names in self._names.values())

    def of(self, layer: int, parameter: Parameter) -> tuple[Tensor, Tensor] | None:
        """A [rank, in] and B [out, rank] of a matrix of a layer, where it has some."""
        module = parameter.name.removesuffix(_WEIGHT)
        kind = self._kinds[layer]
        if f"{module}.lora_A" not in self._names[kind] or not parameter.name.endswith(_WEIGHT):
            return None
        names = (full_name(self._kinds, layer, f"{module}.lora_{side}") for side in "AB")
        down, up = (self._reader.parameter(ADAPTERS, name) for name in names)
        return down, up


def export_merged(found: FoundCheckpoint, folder: Path, precision: str) -> None:
    """The model with its adapters added, W + s B A in fp32, as hf_export.export_checkpoint.

    The frozen model comes from the folder that the run started from, or from the run's seed, in
    the precision that it had beside the adapters. Raises also InputError where it is gone, or
    another one.
    """
    manifest = found.manifest
    model, training = manifest.model, manifest.training
    check_frozen(found, training.weights, frozen_fingerprint(model, training))
    first, sequence = first_values(model, training), model.layer_sequence()
    with Reader(found.path, manifest) as reader:
        every = _Adapters(reader, manifest)

        def values(layer: int, parameter: Parameter) -> Tensor:
            base = whole_values(first, sequence[layer], layer, parameter)
            base = base.to(DTYPES[training.precision]).float()
            pair = every.of(layer, parameter)
            if pair is None:
                return base
            if parameter.experts:
                ends = pair if parameter.name.startswith(RETURNING) else pair[::-1]
                added = products(*ends, every.lora.rank, parameter.experts)
                return base.add_(added, alpha=every.lora.scale)
            return base.addmm_(pair[1], pair[0], alpha=every.lora.scale)

        write_trained(manifest, values, folder, DTYPES[precision], manifest.fingerprint)


def export_adapters(found: FoundCheckpoint, folder: Path, precision: str) -> None:
    """The adapters alone, as peft's folder, for the model that the run started from.

    Raises InputError where the folder exists or cannot be written, RefusedError where no Hugging
    Face family is like the model, CheckpointError where the checkpoint is damaged.
    """
    manifest, dtype = found.manifest, DTYPES[precision]
    model, training = manifest.model, manifest.training
    family = adapted_family(model, training.weights)
    tensors = hf_tensors(family, model, FAMILIES[family].in_transformers)
    nbytes = trained_count(model, training.lora) * dtype.itemsize
    with Reader(found.path, manifest) as reader, written_whole(folder, nbytes) as partial:
        every = _Adapters(reader, manifest)
        made = [one for tensor in tensors if (one := _module(tensor, every)) is not None]
        made += _modules_of_experts(model, family, every)
        named = {f"{one.name}.{part}": value for one in made for part, value in one.parts(dtype)}
        modules = [_named(tensor) for tensor in tensors]
        turned = any(one.transposed for one in made)
        config = _config(every.lora, made, modules, with_experts=model.experts > 0) | {
            "base_model_name_or_path": training.weights,
            "fan_in_fan_out": turned,
        }
        write_json(partial / CONFIG, config)
        save_file(named, partial / WEIGHTS, metadata=METADATA | {EXPORTED: manifest.fingerprint})
        (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode & 0o777)


class _Module(NamedTuple):
    """One module's adapter."""

    module: str  # of the transformers model
    down: Tensor
    up: Tensor
    transposed: bool  # the module's weight is [in, out]
    rank: int
    parameter: str = ""  # of a module of experts, whose tensors `module` names

    @property
    def name(self) -> str:
        """As peft calls it."""
        return f"{PREFIX}{self.module}"

    def parts(self, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
        """Its tensors by the ends of their names."""
        yield "lora_A.weight", self.down.to(dtype).contiguous()
        yield "lora_B.weight", self.up.to(dtype).contiguous()


def _named(tensor: HfTensor) -> str:
    """The module that a matrix is of."""
    return tensor.name.removesuffix(".weight")


def _module(tensor: HfTensor, every: _Adapters) -> _Module | None:
    """The adapter of a tensor of the model's files, where one of its matrices has one.

    Not of experts: their adapters are not of one of them each.
    """
    if tensor.pieces[0].parameter.experts:
        return None
    pairs = [every.of(piece.layer, piece.parameter) for piece in tensor.pieces]
    downs = [pair[0] for pair in pairs if pair is not None]
    if not downs:
        return None
    rank, before, ups = every.lora.rank, 0, []
    for pair, piece in zip(pairs, tensor.pieces, strict=True):
        rows = torch.zeros(piece.shape[0], rank * len(downs))
        if pair is not None:
            rows[:, before : before + rank] = pair[1]
            before += rank
        ups.append(rows)
    up = joined(tensor, ups)
    if tensor.transposed:  # of which `joined` makes [in, out]
        up = up.T
    return _Module(_named(tensor), torch.cat(downs), up, tensor.transposed, rank * len(downs))


def _modules_of_experts(model: ModelSpec, family: str, every: _Adapters) -> Iterator[_Module]:
    """Those of each layer's experts, by the parameters that transformers 5 has."""
    rank = every.lora.rank
    chosen = {p: [t for t in targets if every.has(t)] for p, targets in matrices_of(model).items()}
    nested = all(chosen.values())
    for layer, kind in enumerate(model.layer_sequence()):
        if kind not in BLOCKS or RETURNING not in possible_targets(model, [kind]):
            continue
        places = {p.target: p for p in expert_places(family, model, layer, nested=nested)}
        for parameter, targets in chosen.items():
            pairs, width = {}, rank * len(targets)
            for number, target in enumerate(targets):
                place = places[target]._replace(width=width, first=number * rank)
                pair = every.of(layer, place.matrix)
                assert pair is not None, target
                pairs[place] = pair
            if pairs:
                down, up = exported(pairs, rank)
                yield _Module(places[targets[0]].module, down, up, False, width, parameter)


def _config(
    lora: Lora, made: Iterable[_Module], modules: Iterable[str], *, with_experts: bool
) -> dict[str, Any]:
    """adapter_config.json: every key that says what the tensors are."""
    ends = _ends([one.module for one in made if not one.parameter], modules)
    targets = {end: end for end in ends.values()}
    if with_experts:
        targets = {end: f"{end}.weight" if end.endswith(OF_MLPS) else end for end in targets}
    of_experts = {one.parameter: f"experts.{one.parameter}" for one in made if one.parameter}
    ranks = {of_experts.get(one.parameter) or targets[ends[one.module]]: one.rank for one in made}
    parameters = [target for end, target in targets.items() if end != target]
    parameters = sorted((*parameters, *of_experts.values()))
    wider = {target: rank for target, rank in ranks.items() if rank != lora.rank}
    power = 0.5 if lora.rank_stabilised else 1.0
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "use_rslora": lora.rank_stabilised,
        "rank_pattern": wider,
        "alpha_pattern": {t: _number(lora.scale * rank**power) for t, rank in wider.items()},
        "target_modules": sorted(end for end, target in targets.items() if end == target),
        "lora_dropout": 0.0 if parameters else lora.dropout,  # which peft takes with modules alone
        "bias": "none",
        "inference_mode": True,
        "modules_to_save": None,
    }
    return config | ({"target_parameters": parameters} if parameters else {})


def _number(value: float) -> float | int:
    """Whole numbers as such: peft's own files have them so."""
    return int(value) if value == int(value) else value


def _ends(targets: Iterable[str], modules: Iterable[str]) -> Mapping[str, str]:
    """The shortest end of each target's name that names no module but targets."""
    wanted = list(targets)
    others = set(modules) - set(wanted)

    def end(target: str) -> str:
        parts = target.split(".")
        for start in range(len(parts) - 1, -1, -1):
            found = ".".join(parts[start:])
            if not any(other == found or other.endswith(f".{found}") for other in others):
                return found
        return target

    return {target: end(target) for target in wanted}
