"""config.json files of models with towers for pictures or sound, of which the text model is read.

Their files have the text model's keys in `text_config`, or older ones of Qwen's beside the tower's.
The tower's tensors are left where they are: weights are read beside them, and a folder that is
written has the text model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.spec.hf.families.beside_towers import BESIDE_TOWERS
from bigplan.spec.hf.families.rope import PLACES

_TEXT = "text_config"
_OF_ALL = ("model_type", "tie_word_embeddings", "quantization_config")
# Where text models are of several families, the types of those that are read.
_READ_TEXTS = {"mistral3": ("mistral", "ministral3", "mistral4"), "llava": ("mistral",)}
_FLAT = ("qwen2_vl", "qwen2_5_vl")  # whose first files have one level
_OF_PICTURES = ("vision", "image_token", "video_token")  # in keys of theirs
_SECTIONS = ("mrope_section", "mrope_interleaved")
_WITHIN = "model.language_model."


def text_model(
    config: Mapping[str, Any], lines: Mapping[str, int], where: str
) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """The text model's keys, and the lines where they stand; others' config as it is.

    Its type stays the whole model's, whose files name tensors in another way. Raises InputError,
    and RefusedError for text models of other families.
    """
    model_type = config.get("model_type")
    if model_type not in BESIDE_TOWERS:
        return config, lines
    text = config.get(_TEXT)
    if text is None and model_type in _FLAT:
        text = {k: v for k, v in config.items() if not any(word in k for word in _OF_PICTURES)}
        return _with_plain_rope(text), lines
    if not isinstance(text, Mapping):
        raise InputError(
            f"{where}: `{_TEXT}` is {'missing' if text is None else 'no object'}, in which models "
            f"of type {model_type} say what their text model is; take the model's own config.json"
        )
    start = f"{_TEXT}."
    inside = {k.removeprefix(start): line for k, line in lines.items() if k.startswith(start)}
    read, found = _READ_TEXTS.get(str(model_type)), text.get("model_type")
    if read and found not in read:
        place = f"{where}:{inside['model_type']}" if "model_type" in inside else where
        raise RefusedError(
            f"{place}: the text model has the model_type {quoted(str(found))}, and in models of "
            f"type {model_type} {' or '.join(read)} is read; take such a model"
        )
    whole = {key: config[key] for key in _OF_ALL if key in config}
    return _with_plain_rope({**text, **whole}), inside


def _with_plain_rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without sections of rope, which turn all alike where all tokens are text.

    A section of the angles takes the place of a token in time, one its row in a picture, one its
    column (Qwen2-VL, arXiv 2409.12191); a token of text has one number for all.
    """
    plain = dict(text)
    for place in PLACES:
        if isinstance(rope := text.get(place), Mapping):
            kept = {key: value for key, value in rope.items() if key not in _SECTIONS}
            plain[place] = {k: "default" if v == "mrope" else v for k, v in kept.items()}
    return plain


def names_in_files(name: str) -> Iterator[str]:
    """What files of several ages call a text model's tensor that today's call `name`."""
    yield name
    if name.startswith(_WITHIN):
        rest = name.removeprefix(_WITHIN)
        yield f"language_model.model.{rest}"
        yield f"model.{rest}"
    else:
        yield f"language_model.{name}"
