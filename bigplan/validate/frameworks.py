"""Which framework a row names, and how that framework trained at the time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bigplan.cost.framework import (
    COMPOSER,
    DEEPSPEED,
    FSDP,
    LLMQ,
    MEGATRON,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    Framework,
)
from bigplan.spec.gpu import FlashKernel
from bigplan.validate.rows import PublishedRow

# The kernel that a row's `attention_kernel` names, by pattern.
KERNELS: tuple[tuple[str, FlashKernel], ...] = (
    (r"FA3", "flash3"),
    (r"FA2|flash v2", "flash2"),
    (r"cuDNN|^TE\b", "cudnn"),
)


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
    zero_sums_in_fp32: bool = True  # gradients of bf16 runs under ZeRO; without ZeRO always

    def materialised(self, row: PublishedRow) -> bool:
        """Whether attention scores go to memory: what the row says, else what was usual."""
        if row.attention_kernel:
            return "unfused" in row.attention_kernel
        return self.before_flash

    def gradient_precision(self, row: PublishedRow, precision: str) -> str:
        """Precision of summed and reduced gradients; Composer's modes PURE and DEFAULT state it.

        DeepSpeed's `grad_accum_dtype` is by default the model's precision under ZeRO, else fp32
        for bf16.
        """
        mode = re.search(r"mp mode (PURE|DEFAULT)", row.notes)
        if mode:
            return precision if mode[1] == "PURE" else "fp32"
        low = bool(row.zero_stage or self.zero) and not self.zero_sums_in_fp32
        return precision if low or precision == "fp16" else "fp32"

    def behaviour_of(self, row: PublishedRow) -> Framework:
        """The framework as the row ran it: compiled or not, with asynchronous TP or not.

        Megatron-LM moved the sums of input gradients beside the weight's gradient in September
        2021, and got sequence parallelism in March 2022. So a row that states whether it used
        sequence parallelism had its sums beside the weight's gradient.
        """
        behaviour = self.behaviour
        if behaviour is MEGATRON and row.sequence_parallel is not None:
            behaviour = replace(behaviour, beside_weights=True)
        if row.compile is not None:
            compiled = bool(row.compile)
            behaviour = replace(behaviour, eager=float(not compiled), compiled_loss=compiled)
        if behaviour is MEGATRON_DEEPSPEED and row.precision == "fp32":
            behaviour = replace(behaviour, eager=1.0)  # its fused softmax takes 16 bits alone
        if self.async_tensor if row.async_tp is None else row.async_tp:
            behaviour = replace(behaviour, tensor_exposed=behaviour.tensor_exposed_async)
        if "no overlap" in row.notes:
            behaviour = replace(behaviour, reduce_exposed=1.0, send_exposed=1.0)
        stated = [kernel for text, kernel in KERNELS if re.search(text, row.attention_kernel or "")]
        return replace(behaviour, attention=(*stated, *behaviour.attention))


RULES = (
    FrameworkRule(
        r"Megatron-Bridge|NeMo|Megatron-Core",
        MEGATRON_CORE,
        pads_vocabulary=True,
        zero=1,
        interleaves=True,
        sequence_parallel=True,
        async_tensor=True,
    ),
    FrameworkRule(r"llm\.q", LLMQ),
    FrameworkRule(r"Composer", COMPOSER),
    FrameworkRule(
        r"torchtitan|fms-fsdp|FSDP", FSDP, sequence_parallel=True, micro_batch_per_stage=True
    ),
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
    FrameworkRule(
        r"Megatron",
        MEGATRON,
        pads_vocabulary=True,
        before_flash=True,
        dropout=True,
    ),
    FrameworkRule(r"DeepSpeed|Colossal", DEEPSPEED, zero_sums_in_fp32=False),
)
UNKNOWN = FrameworkRule(r"", FSDP)


def framework_of(name: str) -> FrameworkRule:
    """The first rule whose pattern the name contains; frameworks unknown here run like FSDP."""
    return next((rule for rule in RULES if re.search(rule.pattern, name)), UNKNOWN)
