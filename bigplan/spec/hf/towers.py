"""config.json files of models with towers for pictures or sound, of which the text model is read.

Their files have the text model's keys in `text_config`. The tower's tensors are left where they
are: weights are read beside them, and a folder that is written has the text model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigplan.errors import InputError

_TEXT = "text_config"
WITH_TOWERS = ("qwen3_5", "qwen3_5_moe")  # types whose text model is read


def text_model(
    config: Mapping[str, Any], lines: Mapping[str, int], where: str
) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """The text model's keys, and the lines where they stand; others' config as it is.

    Its type stays the whole model's, whose files name tensors in another way. Raises InputError.
    """
    if config.get("model_type") not in WITH_TOWERS:
        return config, lines
    text = config.get(_TEXT)
    if not isinstance(text, Mapping):
        raise InputError(
            f"{where}: `{_TEXT}` is {'missing' if text is None else 'no object'}, in which models "
            f"of type {config['model_type']} say what their text model is; take the model's own "
            "config.json"
        )
    whole = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
    start = f"{_TEXT}."
    inside = {k.removeprefix(start): line for k, line in lines.items() if k.startswith(start)}
    return {**text, **whole}, inside
