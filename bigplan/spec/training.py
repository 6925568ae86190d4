"""One optimizer step as the user wants it, and the defaults for what was left out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec, validate
from bigplan.spec.hf.peft import started_from
from bigplan.spec.lora import Lora, LoraRequest, check_lora
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer, check_groups
from bigplan.spec.preference import Preference
from bigplan.spec.schedule import MOST_STEPS, Schedule
from bigplan.units import Count

Precision = Literal["bf16", "fp16", "fp32"]
AttentionKernel = Literal["flash", "materialised"]
Kernels = Literal["torch", "generated"]

DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}

DEFAULT_MAX_SEQUENCE_LENGTH = 8192
MOST_TOKENS = 10**9  # a step; published ones have up to 10**8
_LARGEST_SEED = 2**63 - 1  # torch's
DEFAULT_TOKENS_PER_STEP = 4 * 2**20


# Of a loss: a smaller scale would scale gradients down and make them underflow.
SMALLEST_SCALE = 1.0


class LossScale(Spec):
    """Dynamic loss scaling of fp16: halved at an overflow, doubled after steps without one."""

    initial: float = Field(default=65536.0, ge=1)
    """what the first step's loss is multiplied by"""
    growth_interval: int = Field(default=2000, gt=0, le=MOST_STEPS)
    """steps in a row without overflow after which the scale grows"""
    factor: float = Field(default=2.0, gt=1)
    """by which it grows and shrinks"""


class ValidationSpec(Spec):
    """The loss on other data, measured between training steps."""

    data: str = Field(min_length=1)
    """prepared folder or text file"""
    every: int = Field(default=100, gt=0, le=MOST_STEPS)
    """training steps between two validations"""
    batches: int = Field(default=8, gt=0, le=MOST_STEPS)
    """global batches of it that are used at most"""


class Training(Spec):
    """Everything that decides the arithmetic of a step."""

    sequence_length: int = Field(gt=0, le=MOST_TOKENS)
    """tokens in a sequence"""
    global_batch: int = Field(gt=0, le=MOST_TOKENS)
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
    kernels: Kernels = "generated"
    """of norms, activations, positions, loss and AdamW on a GPU, by the native engine: generated
    by bigplan, or torch's; other engines have their own"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability after attention, MLP, embedding and, where materialised, softmax"""
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    """the learning rate over the steps"""
    loss_scale: LossScale = LossScale()
    """used with precision fp16 alone"""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """clip the global gradient norm to this; null: no clipping"""
    seed: int = Field(default=0, ge=0, le=_LARGEST_SEED)
    deterministic: bool = False
    """the same run twice has the same bits on a GPU too; attention's backward is slower"""
    steps: int = Field(default=20, gt=0, le=MOST_STEPS)
    """optimizer steps to run"""
    tokens: int | None = Field(default=None, gt=0)
    """of the whole training, for days, dollars and kWh; how many steps a launch runs is `steps`"""
    data: str = Field(default="bundled", min_length=1)
    """folder written by `bigplan data prepare`, text file (its bytes are tokens), or 'bundled'"""
    isolate_documents: bool = Field(default=False, exclude_if=lambda isolated: not isolated)
    """a token attends to its own document alone, and the first one of a document is no target"""
    document_tokens: float | None = Field(
        default=None, ge=1, le=MOST_TOKENS, exclude_if=lambda mean: mean is None
    )
    """then: tokens of the document, cut by sequences, that a token is in, on average over the
    tokens of `data`; null: not known, so attention is priced as in whole sequences"""
    validation: ValidationSpec | None = None
    """loss on other data, now and then; null: none"""
    weights: str | None = Field(default=None, min_length=1)
    """Hugging Face folder (config.json, safetensors) to start from; null: seeded random weights"""
    lora: Lora | None = Field(default=None, exclude_if=lambda lora: lora is None)
    """train low-rank adapters and freeze the model; null: train the model"""
    preference: Preference | None = Field(default=None, exclude_if=lambda wanted: wanted is None)
    """learn which of two responses was preferred; null: learn the next token"""

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
        if self.lora is not None:
            self._check_lora()
        if self.preference is not None and not self.isolate_documents:
            raise InputError(
                "preference: two responses to a prompt are documents that must not see each other, "
                "but isolate_documents is off; leave isolate_documents out"
            )
        if self.isolate_documents and self.attention != "flash":
            raise InputError(
                f"isolate_documents does not go with attention {self.attention}; use attention: "
                "flash, or leave isolate_documents off"
            )
        if self.document_tokens is not None and not self.isolate_documents:
            raise InputError(
                f"document_tokens {self.document_tokens:g} says how long documents are that are "
                "kept apart, but isolate_documents is off; use isolate_documents: true, or leave "
                "document_tokens out"
            )
        if self.tokens_per_step > MOST_TOKENS:
            raise InputError(
                f"global_batch {self.global_batch} of {self.sequence_length} tokens each is "
                f"{self.tokens_per_step:.3g} tokens a step, and at most {MOST_TOKENS:.0e} are "
                "planned; global_batch counts sequences, not tokens"
            )
        decays = self.schedule.name != "constant" and self.schedule.decay_steps is None
        if decays and self.schedule.warmup_steps >= self.steps:
            raise InputError(self.schedule.too_long(self.steps, "steps"))
        return self

    def _check_lora(self) -> None:
        for key in ("fp8_gemms", "dropout"):
            if getattr(self, key):
                raise InputError(f"{key} does not go with lora; leave one of the two out")

    @property
    def deferred_updates(self) -> bool:
        """Whether updates wait for all gradients, to know their norm or to look for overflow."""
        return self.clip_norm is not None or self.precision == "fp16"

    @property
    def attended_length(self) -> int:
        """Tokens of sequences in which attention has as much to do, without a window."""
        if not self.isolate_documents or self.document_tokens is None:
            return self.sequence_length
        return min(self.sequence_length, round(self.document_tokens))

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

    sequence_length: int | None = Field(default=None, gt=0, le=MOST_TOKENS)
    """tokens in a sequence; default: the model's longest, at most 8192"""
    global_batch: int | None = Field(default=None, gt=0, le=MOST_TOKENS)
    """sequences per optimizer step; default: 4 Mi tokens' worth"""
    tokens_per_step: Count | None = Field(default=None, gt=0, le=MOST_TOKENS)
    """in place of global_batch: a multiple of the sequence length"""
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
    kernels: Kernels | None = None
    """the native engine's norms, activations, loss on a GPU: generated (default), or torch's"""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """probability of dropout; default 0"""
    optimizer: Optimizer | None = None
    """AdamW (default), SGD or Muon, and its constants"""
    schedule: Schedule | None = None
    """learning rate over the steps; default constant"""
    loss_scale: LossScale | None = None
    """dynamic loss scaling of precision fp16"""
    clip_norm: float | None = Field(default=None, gt=0)
    """clip the global gradient norm to this; default 1.0; null: no clipping"""
    seed: int | None = Field(default=None, ge=0, le=_LARGEST_SEED)
    """default 0"""
    deterministic: bool | None = None
    """the same run twice has the same bits on a GPU too, more slowly; default false"""
    steps: int | None = Field(default=None, gt=0, le=MOST_STEPS)
    """optimizer steps to run; default: launch.steps, or 20"""
    tokens: Count | None = Field(default=None, gt=0)
    """of the whole training, such as 1 T: a plan tells its days, dollars and kWh"""
    data: str | None = Field(default=None, min_length=1)
    """folder written by `bigplan data prepare`, text file, or 'bundled' (default)"""
    isolate_documents: bool | None = None
    """a token attends to its own document alone; default false, with `preference` true"""
    document_tokens: float | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """then: tokens of the document that a token is in, on average; default: as `data` has them"""
    validation: ValidationSpec | None = None
    """loss on other data, now and then; default: none"""
    weights: str | None = Field(default=None, min_length=1)
    """Hugging Face folder to start from; default: seeded random weights"""
    lora: LoraRequest | None = None
    """train low-rank adapters and freeze the model; default: train the model"""
    preference: Preference | None = None
    """learn which of two responses was preferred; default: learn the next token"""


# Keys that may change while a run goes on: none of them enters the arithmetic of a step. Of `data`
# the place may change: a checkpoint knows the content (Manifest.data).
FREE_IN_A_RUN = frozenset({"tokens", "validation", "data", "document_tokens"})


def resolve(request: TrainingRequest, model: ModelSpec) -> Training:
    """The request with its defaults filled in for this model.

    Raises InputError where the sequence is longer than learned positions reach, where adapters
    have no target in the model or are not those of the folder that they start from, or where no
    trained parameter is in one of the optimizer's groups.
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
    if (tokens := given.pop("tokens_per_step", None)) is not None:
        given["global_batch"] = _sequences(tokens, length, given.get("global_batch"))
    given.setdefault("global_batch", max(1, DEFAULT_TOKENS_PER_STEP // length))
    if "preference" in given:
        given.setdefault("isolate_documents", True)
    if request.lora is not None:
        lora = request.lora.model_dump(exclude_none=True)
        from_folder = lora.get("weights") is not None
        given["lora"] = started_from(lora, model, given.get("weights")) if from_folder else lora
    training = validate(given, Training, "training")
    if training.lora is not None:
        check_lora(training.lora, model)
    check_groups(training.optimizer, model, training.lora)
    return training


def _sequences(tokens: int, length: int, batch: int | None) -> int:
    """Sequences in `tokens` tokens. Raises InputError where that is no whole number."""
    if batch is not None:
        raise InputError(
            f"tokens_per_step {tokens} and global_batch {batch} both say how large a step is; "
            "leave one out"
        )
    if tokens % length:
        near = max(1, round(tokens / length)) * length
        raise InputError(
            f"tokens_per_step {tokens} is no multiple of sequence_length {length}; "
            f"write one, such as {near}"
        )
    return tokens // length
