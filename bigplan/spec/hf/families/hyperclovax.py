"""HyperCLOVA X: a Granite that multiplies logits, with norms after attention and MLP, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.granite import GRANITE
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Scores have their usual factor where the file says none."""
    told = reader.config.get("attention_multiplier")
    usual = {} if told is not None else {"attention_multiplier": 1.0}
    fields = GRANITE.read(replace(reader, config={**reader.config, **usual}))
    head_dim = fields.get("head_dim") or fields["hidden"] // fields["heads"]
    return fields | {
        "score_scale": None if told == head_dim**-0.5 else told,
        "logit_scale": reader.number("logits_scaling"),
        "norms": "around" if reader.flag("use_post_norm") else "before",
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return GRANITE.write(model) | {
        "model_type": "hyperclovax",
        "architectures": ["HyperCLOVAXForCausalLM"],
        "logits_scaling": model.logit_scale,
        "use_post_norm": model.norms == "around",
    }


_CLOSING = {
    "attention_closing_norm": "model.layers.{}.post_norm1",
    "mlp_closing_norm": "model.layers.{}.post_norm2",
}
HYPERCLOVAX = ModelFamily(
    _read,
    {**GRANITE.defaults, "attention_multiplier": None, "use_post_norm": True},
    _write,
    replace(GRANITE.tensors, names={**GRANITE.tensors.names, **_CLOSING}),
    {**GRANITE.keys, "norms": ("use_post_norm",)},
)
