"""One optimizer step as the user wants it, and the defaults for what was left out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.document import Spec, validate
from bigplan.spec.model import ModelSpec

Precision = Literal["bf16", "fp16", "fp32"]
AttentionKernel = Literal["flash", "materialised"]

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
    """dtype of compute; bf16 and fp16 keep fp32 master weights"""
    gradient_precision: Precision = "fp32"
    """dtype in which gradients are accumulated and stored"""
    reduce_precision: Precision | None = None
    """dtype in which gradients are reduced over data-parallel ranks; null: gradient_precision"""
    fp8_gemms: bool = False
    """the blocks' GEMMs run in fp8"""
    attention: AttentionKernel = "flash"
    """flash: scores never reach memory; materialised: matrix products and a softmax kernel"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability after attention, MLP, embedding and, where materialised, softmax"""
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
        for key in ("gradient_precision", "reduce_precision"):
            value = getattr(self, key)
            if value not in (None, "fp32", self.precision):
                raise InputError(
                    f"{key} {value} does not go with precision {self.precision}; "
                    f"use {_either(key, self.precision)}, or precision: {value}"
                )
        if self.fp8_gemms and self.precision == "fp32":
            raise InputError(
                "fp8_gemms needs a 16-bit precision around the GEMMs, and precision is fp32; "
                "use precision: bf16, or leave fp8_gemms off"
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


def _either(key: str, precision: str) -> str:
    return " or ".join(f"{key}: {name}" for name in dict.fromkeys(("fp32", precision)))


class TrainingRequest(Spec):
    """The `training:` part as the user writes it: everything is optional."""

    sequence_length: int | None = Field(default=None, gt=0)
    """tokens in a sequence; default: the model's longest, at most 8192"""
    global_batch: int | None = Field(default=None, gt=0)
    """sequences per optimizer step; default: 4 Mi tokens' worth"""
    precision: Precision | None = None
    """dtype of compute; default bf16"""
    gradient_precision: Precision | None = None
    """dtype of stored gradients: fp32 (default) or the precision"""
    reduce_precision: Precision | None = None
    """dtype in which gradients are reduced over data-parallel ranks; default: gradient_precision"""
    fp8_gemms: bool | None = None
    """the blocks' GEMMs run in fp8, where the GPU has it; default false"""
    attention: AttentionKernel | None = None
    """flash (default), or materialised: scores go through memory"""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """probability of dropout; default 0"""
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
