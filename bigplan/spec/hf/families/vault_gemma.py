"""VaultGemma: a Gemma 2 with norms before attention and MLP alone."""

from __future__ import annotations

from bigplan.spec.hf.families.gemma import GEMMA2
from bigplan.spec.hf.families.parts import always

VAULT_GEMMA = GEMMA2.like(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    {},
    always(norms="before"),
    tensors=GEMMA2.tensors.but({}, without=("attention_closing_norm", "mlp_closing_norm")),
)
