"""VaultGemma: a Gemma 2 with norms before attention and MLP alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.gemma import GEMMA2
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_CLOSING = ("attention_closing_norm", "mlp_closing_norm")


def _read(reader: ConfigReader) -> dict[str, Any]:
    return GEMMA2.read(reader) | {"norms": "before"}


def _write(model: ModelSpec) -> dict[str, Any]:
    named = {"model_type": "vaultgemma", "architectures": ["VaultGemmaForCausalLM"]}
    return GEMMA2.write(model) | named


VAULT_GEMMA = ModelFamily(
    _read,
    GEMMA2.defaults,
    _write,
    replace(
        GEMMA2.tensors,
        names={n: t for n, t in GEMMA2.tensors.names.items() if n not in _CLOSING},
    ),
    GEMMA2.keys,
)
