"""HyperCLOVA X: a Granite that multiplies logits, with norms after attention and MLP, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.granite import GRANITE
from bigplan.spec.hf.families.parts import Part, numbers
from bigplan.spec.hf.reader import ConfigReader

_POST = Part(
    lambda reader: {"norms": "around" if reader.flag("use_post_norm") else "before"},
    lambda model: {"use_post_norm": model.norms == "around"},
    {"norms": ("use_post_norm",)},
)
_HYPERCLOVAX = GRANITE.like(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    {"attention_multiplier": None, "use_post_norm": True},
    numbers(logit_scale="logits_scaling"),
    _POST,
    tensors=GRANITE.tensors.but(
        {
            "attention_closing_norm": "model.layers.{}.post_norm1",
            "mlp_closing_norm": "model.layers.{}.post_norm2",
        }
    ),
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Scores have their usual factor where the file says none."""
    told = reader.config.get("attention_multiplier")
    usual = {} if told is not None else {"attention_multiplier": 1.0}
    fields = _HYPERCLOVAX.read(reader.saying(usual))
    head_dim = fields.get("head_dim") or fields["hidden"] // fields["heads"]  # 0: no model
    usual = head_dim and told == head_dim**-0.5
    return fields | {"score_scale": None if usual else told}


HYPERCLOVAX = replace(_HYPERCLOVAX, read=_read)
