"""Which framework a row names, and how that framework trained at the time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bigplan.cost.framework import (
    COMPOSER,
    DEEPSPEED,
    FSDP,
    FSDP_PEFT,
    INTERN_EVO,
    INTERN_EVO_FSDP,
    LLMQ,
    MEGATRON,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    NANOTRON,
    PLAIN,
    PYTORCH,
    SCALING,
    Framework,
)
from bigplan.graph.policies import Selective
from bigplan.spec.gpu import FlashKernel
from bigplan.spec.step import StepOp
from bigplan.validate.rows import PublishedRow

# The kernel that a row's `attention_kernel` names, by pattern.
# FlashAttention-4 is up to 1.3 times as fast as cuDNN's on a B200 (its abstract), which is nearest.
KERNELS: tuple[tuple[str, FlashKernel], ...] = (
    (r"FA-?4|Flash ?Attention[- ]?4", "cudnn"),
    (r"FA-?3|Flash ?Attention[- ]?3", "flash3"),
    (r"FA-?2|Flash ?Attention[- ]?2|flash v2", "flash2"),
    (r"FA-?1|Flash ?Attention[- ]?1", "flash1"),
    (r"cuDNN|^TE\b", "cudnn"),
)
UNFUSED = re.compile(r"unfused|eager|naive|materiali[sz]ed", re.IGNORECASE)
# GPUs that came out in late 2022 or later.
SINCE_HOPPER = re.compile(r"H\d|GH|GB|B\d|MI3|L4|(RTX.?)?[45]0[6-9]0|RTX.?PRO|.*Ada", re.IGNORECASE)
PURE = re.compile(r"pure bf16|bf16-true", re.IGNORECASE)  # in a row's notes
# Names of kernels that take the place of a model's norms, activations and rotary positions.
FUSING = re.compile(r"Liger|Unsloth", re.IGNORECASE)
PEFT = re.compile(r"\bpeft\b", re.IGNORECASE)  # its adapters, and how it wraps them for FSDP
AUTOMODEL = "Automodel"  # takes Liger's where there is no tensor parallelism (auto_model.py)
FUSED_NORM = re.compile(r"fused[ _]rms_?norm(?!=False)", re.IGNORECASE)  # in a row's notes
# In a row's notes: queries, keys and values are products of their own, as are gate and up.
APART = re.compile(r"fuse_attention_qkv=(0|False)")
SEPARATE = (3, 2)
# In a source's locator: torchtitan compiled blocks and not the loss, from "turning off compile on
# loss function" (December 2024) to its build_cross_entropy_loss (April 2025).
LOSS_APART = re.compile(r"2024-?12|2025-?0[1-3]")


@dataclass(frozen=True, slots=True)
class FrameworkRule:
    """How rows that name a framework are priced."""

    pattern: str  # of the row's `framework`
    behaviour: Framework
    pads_vocabulary: bool = False  # to a multiple of 128 x tensor parallelism
    zero: int = 0  # where the row does not say
    interleaves: bool = False  # virtual stages, where the row does not say
    sequence_parallel: bool = False  # where the row does not say
    async_tensor: bool = False  # asynchronous tensor parallelism, where the row does not say
    before_flash: bool = False  # scores were materialised
    dropout: bool = False
    micro_batch_per_stage: bool = False  # as many micro-batches as pipeline stages, by default
    # Whether a compiler fuses chains of kernels, where the row does not say; None: the behaviour
    # says what is fused. torch.compile is off unless asked for.
    compiles: bool | None = None
    loss_apart: re.Pattern[str] | None = None  # sources of the time when no loss was compiled
    pure: bool = False  # trains in 16 bits alone
    selective: Selective = "cheap"  # what selective recomputation runs again
    fuses_norms: bool = False  # RMSNorms are one kernel, compiled or not
    zero_sums_in_fp32: bool = True  # gradients of bf16 runs under ZeRO; without ZeRO always
    reduces_in_fp32: bool = False  # gradients between ranks, whatever they are summed in

    def materialised(self, row: PublishedRow) -> bool:
        """Whether attention scores go to memory: what the row says, else what was usual."""
        if row.attention_kernel:
            return UNFUSED.search(row.attention_kernel) is not None
        return self.before_flash and not self.recent(row)

    def drops_out(self, row: PublishedRow) -> bool:
        """Whether the model trained with dropout, as GPT-2 did; models of LLaMA's time do not."""
        return self.dropout and not self.recent(row)

    def recent(self, row: PublishedRow) -> bool:
        """Whether the run is of 2023 or later: models with a gated MLP, as LLaMA, or a new GPU.

        Megatron-DeepSpeed forked before, and stayed as it was.
        """
        if self.behaviour is MEGATRON_DEEPSPEED:
            return False
        return bool(row.gated_mlp) or SINCE_HOPPER.match(row.gpu) is not None

    def trains_purely(self, row: PublishedRow) -> bool:
        """Whether parameters, gradients and moments are all in 16 bits, without a master copy."""
        alone = row.adapter is not None and not self._under_zero(row)
        return self.pure or alone or PURE.search(row.notes) is not None

    def _under_zero(self, row: PublishedRow) -> bool:
        """Whether DeepSpeed's ZeRO keeps fp32 master copies."""
        zero = self.zero if row.zero_stage is None else row.zero_stage
        return self.behaviour.name == DEEPSPEED.name and zero > 0

    def _compiled(self, row: PublishedRow) -> bool | None:
        """Whether chains of kernels are fused by a compiler; None: the behaviour has its own."""
        if row.compile is not None:
            return bool(row.compile)
        if self.compiles is None:
            return None
        return self.compiles or row.precision == "fp8"  # torch's fp8 pays where it is compiled

    def _loss_apart(self, row: PublishedRow) -> bool:
        """Whether the loss was not compiled where the rest was."""
        return self.loss_apart is not None and bool(self.loss_apart.search(row.source_locator))

    def gradient_precision(self, row: PublishedRow, precision: str) -> str:
        """Precision of summed and reduced gradients; Composer's modes PURE and DEFAULT state it.

        DeepSpeed's `grad_accum_dtype` is by default the model's precision under ZeRO, else fp32
        for bf16.
        """
        if self.trains_purely(row) or "bf16 gradients" in row.notes:
            return precision
        mode = re.search(r"mp mode (PURE|DEFAULT)", row.notes)
        if mode:
            return precision if mode[1] == "PURE" else "fp32"
        low = bool(row.zero_stage or self.zero) and not self.zero_sums_in_fp32
        return precision if low or precision == "fp16" else "fp32"

    def behaviour_of(self, row: PublishedRow) -> Framework:
        """The framework as the row ran it: compiled or not, with asynchronous TP or not."""
        behaviour = self._variant(row)
        compiled = self._compiled(row)
        if compiled is not None:
            loss = compiled and not self._loss_apart(row)
            behaviour = replace(
                behaviour,
                eager=float(not compiled),
                chains=frozenset() if compiled else PLAIN,
                pads_products=compiled,
                compiled_loss=loss,
                compiles_loss=loss and self.selective != "dots",  # XLA's was not timed
            )
        if self.behaviour is MEGATRON_DEEPSPEED and row.precision == "fp32":
            behaviour = replace(behaviour, eager=1.0)  # its fused softmax takes 16 bits alone
        if self.behaviour in (MEGATRON, MEGATRON_DEEPSPEED) and row.gated_mlp:
            gates = frozenset({StepOp.ACTIVATION})
            behaviour = replace(behaviour, eager=1.0, chains=gates)  # its fused kernels are GPT's
        if self.behaviour is COMPOSER and row.gated_mlp:
            behaviour = replace(behaviour, eager=1.0, chains=PLAIN)  # its fused kernels are MPT's
        if FUSING.search(row.framework) or (AUTOMODEL in row.framework and (row.tp or 1) == 1):
            behaviour = replace(behaviour, eager=0.0, chains=frozenset())
        if self.fuses_norms or FUSED_NORM.search(row.notes):
            # PaddleNLP's and InternEvo's norms stay chains in time: something else there, which is
            # not known, takes as long.
            chains, known = behaviour.chains - {StepOp.NORM}, self.behaviour is SCALING
            behaviour = replace(behaviour, chains=chains, fused_norms=known)
        # NeMo's recipes for adapters leave it off (`finetune_performance_optimizations`).
        usual = self.async_tensor and row.adapter is None
        if usual if row.async_tp is None else row.async_tp:
            behaviour = replace(
                behaviour,
                tensor_exposed=behaviour.tensor_exposed_async,
                gathers_for_adapters=behaviour is MEGATRON_CORE and row.adapter is not None,
            )
        if APART.search(row.notes):
            behaviour = replace(behaviour, inputs_summed=SEPARATE)
        if "no overlap" in row.notes:
            behaviour = replace(behaviour, reduce_exposed=1.0, send_exposed=1.0)
            behaviour = replace(behaviour, beside_weights=False)
        told = row.attention_kernel or ""
        stated = [kernel for text, kernel in KERNELS if re.search(text, told, re.IGNORECASE)]
        return replace(behaviour, attention=(*stated, *behaviour.attention))

    def _variant(self, row: PublishedRow) -> Framework:
        """The framework with the optimizer and the sums that the row had.

        Megatron-LM moved the sums of input gradients beside the weight's gradient in September
        2021, and got sequence parallelism in March 2022. So a row that states whether it used
        sequence parallelism had its sums beside the weight's gradient. Its distributed optimizer
        scatters the sums of gradients.
        """
        if self.behaviour is MEGATRON:
            return replace(
                MEGATRON,
                beside_weights=row.sequence_parallel is not None,
                reduce_scatters=bool(row.zero_stage),
            )
        if self.behaviour is DEEPSPEED and row.adapter and row.n_gpus == 1:
            # Scripts for one GPU start without DeepSpeed (finetune_lora_single_gpu.sh of Qwen).
            return replace(PYTORCH, eager=1.0, chains=PLAIN)
        if self.behaviour is FSDP and row.adapter and PEFT.search(row.framework):
            return FSDP_PEFT
        if self.behaviour is INTERN_EVO and row.zero_stage == 3:
            return INTERN_EVO_FSDP
        return self.behaviour


# Megatron-LM before it became Megatron Core; NeMo trained with its code until Transformer Engine.
MEGATRON_LM = FrameworkRule(
    r"NeMo.*\b20(1\d|2[0-2])",
    MEGATRON,
    pads_vocabulary=True,
    before_flash=True,
    dropout=True,
    selective="core",
)
CORE = FrameworkRule(
    r"Megatron-Bridge|NeMo(?!.*Automodel)|Megatron-?Core|Megatron(?!.*DeepSpeed).*(mcore|\b20(2[4-9]|3\d))",
    MEGATRON_CORE,
    pads_vocabulary=True,
    zero=1,
    interleaves=True,
    sequence_parallel=True,
    async_tensor=True,
    selective="core",
)
RULES = (
    MEGATRON_LM,
    CORE,
    FrameworkRule(r"llm\.[qc]\b", LLMQ),
    FrameworkRule(r"Composer", COMPOSER, zero=3),
    FrameworkRule(r"JAX|MaxText|Alpa\b|Levanter|Pax|XLA", FSDP, compiles=True, selective="dots"),
    FrameworkRule(r"torchtune", FSDP, zero=3, compiles=False, pure=True),
    FrameworkRule(r"fms-fsdp", FSDP, zero=3, sequence_parallel=True, compiles=True),
    FrameworkRule(
        r"torchtitan",
        FSDP,
        zero=3,
        sequence_parallel=True,
        micro_batch_per_stage=True,
        compiles=False,
        loss_apart=LOSS_APART,
        selective="operators",
    ),
    FrameworkRule(
        r"Automodel|FSDP",
        FSDP,
        zero=3,
        sequence_parallel=True,
        micro_batch_per_stage=True,
        compiles=False,
    ),
    FrameworkRule(r"nanotron", NANOTRON, sequence_parallel=True),
    FrameworkRule(
        r"AA-Scaling", SCALING, compiles=False, zero_sums_in_fp32=False, reduces_in_fp32=True
    ),
    # Megatron's layers in a Hugging Face model, whose projections are separate.
    FrameworkRule(
        r"^DeepSpeed 3D", replace(DEEPSPEED, inputs_summed=SEPARATE), zero_sums_in_fp32=False
    ),
    FrameworkRule(r"InternEvo", INTERN_EVO, compiles=False, fuses_norms=True),
    FrameworkRule(
        r"HF Trainer", DEEPSPEED, before_flash=True, dropout=True, zero_sums_in_fp32=False
    ),
    FrameworkRule(
        r"DeepSpeed.*Megatron|DeepSpeed ZeRO-(2|3) Offload",
        DEEPSPEED,
        pads_vocabulary=True,
        before_flash=True,
        dropout=True,
        zero_sums_in_fp32=False,
    ),
    FrameworkRule(
        r"Megatron.DeepSpeed",
        MEGATRON_DEEPSPEED,
        pads_vocabulary=True,
        before_flash=True,
        dropout=True,
    ),
    replace(MEGATRON_LM, pattern=r"Megatron"),
    FrameworkRule(r"DeepSpeed|Colossal", DEEPSPEED, zero_sums_in_fp32=False),
)
# An unknown framework runs plain PyTorch: flash attention, other operators as chains of kernels,
# gradients reduced during the backward, updated parameters gathered after the update.
UNKNOWN = FrameworkRule(r"", PYTORCH, compiles=False)


def framework_of(name: str, gpu: str = "") -> FrameworkRule:
    """The first rule whose pattern the name contains; frameworks unknown here run plain PyTorch.

    Megatron-LM on GPUs of Hopper or later is Megatron Core, which it had become by then.
    """
    found = next((rule for rule in RULES if re.search(rule.pattern, name)), UNKNOWN)
    if found.behaviour is MEGATRON and SINCE_HOPPER.match(gpu):
        return CORE
    return found
