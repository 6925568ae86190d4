"""One optimizer step as the user wants it, and the defaults for what was left out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.document import Spec, validate
from bigplan.spec.model import ModelSpec

Precision = Literal["bf16", "fp32"]

DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}

DEFAULT_MAX_SEQUENCE_LENGTH = 8192
DEFAULT_TOKENS_PER_STEP = 4 * 2**20


class Optimizer(Spec):
    """AdamW and its constants; the defaults are those of Llama-style pre-training."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)


class Training(Spec):
    """Everything that decides the arithmetic of a step."""

    sequence_length: int = Field(gt=0)
    """tokens in a sequence"""
    global_batch: int = Field(gt=0)
    """sequences per optimizer step, over all GPUs"""
    precision: Precision = "bf16"
    """dtype of compute; bf16 keeps fp32 master weights"""
    gradient_precision: Precision = "fp32"
    """dtype in which gradients are accumulated, reduced and stored"""
    optimizer: Optimizer = Optimizer()
    clip_norm: float | None = Field(default=1.0, gt=0)
    """clip the global gradient norm to this; null: no clipping"""
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=20, gt=0)
    """optimizer steps to run"""
    data: str = Field(default="bundled", min_length=1)
    """path of a text file, or 'bundled'"""

    @model_validator(mode="after")
    def _check(self) -> Training:
        if self.precision == "fp32" and self.gradient_precision == "bf16":
            raise InputError(
                "gradient_precision bf16 loses what precision fp32 keeps; "
                "use gradient_precision: fp32, or precision: bf16"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the global batch."""
        return self.sequence_length * self.global_batch

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of the compute dtype."""
        return DTYPE_BYTES[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one element of a stored gradient."""
        return DTYPE_BYTES[self.gradient_precision]


class TrainingRequest(Spec):
    """The `training:` part as the user writes it: everything is optional."""

    sequence_length: int | None = Field(default=None, gt=0)
    """tokens in a sequence; default: the model's longest, at most 8192"""
    global_batch: int | None = Field(default=None, gt=0)
    """sequences per optimizer step; default: 4 Mi tokens' worth"""
    precision: Precision | None = None
    """bf16 (default) or fp32"""
    gradient_precision: Precision | None = None
    """dtype of stored gradients; default fp32"""
    optimizer: Optimizer | None = None
    """AdamW and its constants"""
    clip_norm: float | None = Field(default=None, gt=0)
    """clip the global gradient norm to this; default 1.0; null: no clipping"""
    seed: int | None = Field(default=None, ge=0)
    """default 0"""
    steps: int | None = Field(default=None, gt=0)
    """optimizer steps to run; default 20"""
    data: str | None = Field(default=None, min_length=1)
    """path of a text file, or 'bundled' (default)"""


def resolve(request: TrainingRequest, model: ModelSpec) -> Training:
    """The request with its defaults filled in for this model.

    Raises InputError where the sequence is longer than learned positions reach.
    """
    stated = request.model_dump(exclude_unset=True)
    # Only here does null mean something: no clipping. Elsewhere it means the default.
    given = {key: value for key, value in stated.items() if value is not None or key == "clip_norm"}
    longest = model.max_sequence_length
    length = given.setdefault("sequence_length", min(longest, DEFAULT_MAX_SEQUENCE_LENGTH))
    if length > longest and model.positions == "learned":
        raise InputError(
            f"sequence_length {length} is longer than the {longest} positions that "
            f"{model.name} has learned; use at most {longest}"
        )
    given.setdefault("global_batch", max(1, DEFAULT_TOKENS_PER_STEP // length))
    return validate(given, Training, "training")
