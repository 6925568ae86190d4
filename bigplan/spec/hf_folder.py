"""A Hugging Face folder that weights are read from: whether its config.json is a model's."""

from __future__ import annotations

from pathlib import Path

from bigplan.errors import InputError
from bigplan.spec.families import FAMILIES
from bigplan.spec.hf import load_hf_config
from bigplan.spec.hf_keys import Own
from bigplan.spec.hf_write import differences
from bigplan.spec.model import ModelSpec
from bigplan.spec.reading import read_json

CONFIG = "config.json"
SINGLE = "model.safetensors"


def family_of(folder: Path, model: ModelSpec) -> str:
    """The folder's model_type, its config being that of `model`. Raises InputError."""
    if not folder.is_dir():
        raise InputError(
            f"training.weights: {folder} is no folder; name a Hugging Face folder with "
            f"{CONFIG} and {SINGLE}, or leave weights out to start from random ones"
        )
    path = folder / CONFIG
    theirs = load_hf_config(path)
    found = read_json(path)
    model_type = str(found.data["model_type"])
    different = differences(model, theirs)
    if different:
        own = Own(found.data, FAMILIES[model_type].keys, found.lines)
        shown = ", ".join(
            f"{own.key((), key)} {getattr(theirs, key)} instead of {getattr(model, key)}"
            for key in different
        )
        raise InputError(
            f"{path} has {shown}: these weights are not those of {model.name}; plan with this "
            f"config.json as the model, or name the folder of {model.name}"
        )
    return model_type
