"""transformers' class of Mistral 4's text model, which its AutoModelForCausalLM leaves out."""

from __future__ import annotations

import transformers


def register() -> None:
    """Make AutoModelForCausalLM know it."""
    transformers.AutoModelForCausalLM.register(
        transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
    )
