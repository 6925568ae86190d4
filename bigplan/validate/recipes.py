"""How Megatron-Bridge's recipes run experts, release by release.

Each release has performance configurations in scripts/performance/configs; read at the tags v0.1.0
(container 25.09), v0.2.0 (25.11), v0.3.0 and v0.3.1 (26.02, 26.02.01), v0.4.0 and v0.4.2 (26.04,
26.04.01), v0.5.0 and v0.5.1 (26.06, 26.06.01), of two variants the second. Tables of results name
the container.

    moe_flex_dispatcher_backend   DeepEP or HybridEP: a token goes once to each rank; none: each of
                                  its copies by all-to-all
    moe_a2a_overlap               exchanges beside the compute of another micro-batch
    cuda_graph_impl               full_iteration: a step is one CUDA graph. All such recipes have
                                  cutedsl_fused_grouped_mlp, too, and all but one
                                  fp8_dot_product_attention
    recompute_modules             layernorm and moe_act are selective recomputation here, and so is
                                  mla_up_proj, which runs queries' second product again besides

Graphs of single modules (attn, moe_router, moe_preprocess) are left out. The table of 26.02.01
prints the layout of 26.02 for Qwen3 30B on H100s, so its other flags count there, too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from bigplan.validate.rows import PublishedRow

DEEPSEEK, GPT_OSS = "deepseek-v3", "gpt-oss-120b"
QWEN_30B, QWEN_235B = "qwen3-30b-a3b", "qwen3-235b-a22b"
ANY = ""  # GPU or precision


class Way(NamedTuple):
    """How tokens reach their experts, and what launches the kernels."""

    once: bool = False
    beside: bool = False
    pads: bool = False  # DeepEP, where HybridEP pads rows as it copies them
    whole: bool = False  # a step is a CUDA graph, and experts are one fused kernel a product
    mxfp8_attention: bool = False


class _Since(NamedTuple):
    """What holds for a model on GPUs whose name begins so, from a release on."""

    model: str
    gpu: str
    precision: str
    release: tuple[int, ...]
    way: Way


ALL_TO_ALL, ONCE = Way(), Way(once=True)
DEEP_EP = Way(once=True, pads=True)
BESIDE, ONCE_BESIDE = Way(beside=True), Way(once=True, beside=True)
DEEP_EP_BESIDE = DEEP_EP._replace(beside=True)
WHOLE_16 = Way(once=True, beside=True, whole=True)
WHOLE = WHOLE_16._replace(mxfp8_attention=True)

# Of those that a row meets the last one counts.
RECIPES = (
    _Since(DEEPSEEK, "H100", ANY, (25, 9), DEEP_EP_BESIDE),
    _Since(DEEPSEEK, "H100", ANY, (26, 2), ONCE),
    _Since(DEEPSEEK, "B200", ANY, (25, 9), ALL_TO_ALL),
    _Since(DEEPSEEK, "B200", ANY, (26, 2), ONCE),
    _Since(DEEPSEEK, "B200", "fp8", (26, 4, 1), DEEP_EP_BESIDE),
    _Since(DEEPSEEK, "B300", ANY, (26, 2), ONCE),
    _Since(DEEPSEEK, "B300", "fp8", (26, 6, 1), WHOLE),
    _Since(DEEPSEEK, "GB", ANY, (25, 11), ONCE),
    _Since(DEEPSEEK, "GB200", "fp8", (26, 6), WHOLE_16),
    _Since(DEEPSEEK, "GB300", "fp8", (26, 6), WHOLE),
    _Since(GPT_OSS, ANY, ANY, (25, 11), ALL_TO_ALL),
    _Since(GPT_OSS, "B200", ANY, (26, 4), ONCE),
    _Since(GPT_OSS, "B200", ANY, (26, 4, 1), ALL_TO_ALL),
    _Since(GPT_OSS, "B300", ANY, (26, 4), ONCE),
    _Since(GPT_OSS, "GB200", ANY, (26, 4), ONCE_BESIDE),
    _Since(GPT_OSS, "GB200", ANY, (26, 4, 1), BESIDE),
    _Since(GPT_OSS, "GB", "fp8", (26, 6), WHOLE),
    _Since(QWEN_235B, "H100", ANY, (25, 11), BESIDE),
    _Since(QWEN_235B, "H100", ANY, (26, 2, 1), DEEP_EP_BESIDE),
    _Since(QWEN_235B, "H100", ANY, (26, 4), BESIDE),
    _Since(QWEN_235B, "B200", ANY, (25, 11), BESIDE),
    _Since(QWEN_235B, "B200", ANY, (26, 2), ALL_TO_ALL),
    _Since(QWEN_235B, "B300", ANY, (26, 2), BESIDE),
    _Since(QWEN_235B, "B", ANY, (26, 2, 1), DEEP_EP),
    _Since(QWEN_235B, "B", ANY, (26, 4), ALL_TO_ALL),
    _Since(QWEN_235B, "B300", ANY, (26, 4, 1), ONCE),
    _Since(QWEN_235B, "B", "fp8", (26, 6, 1), WHOLE),
    _Since(QWEN_235B, "GB", ANY, (25, 11), ONCE),
    _Since(QWEN_235B, "GB", "fp8", (26, 6), WHOLE),
    _Since(QWEN_30B, "H100", ANY, (25, 11), BESIDE),
    _Since(QWEN_30B, "H100", ANY, (26, 2), DEEP_EP_BESIDE),
    _Since(QWEN_30B, "H100", ANY, (26, 4), ONCE),
    _Since(QWEN_30B, "B200", ANY, (25, 11), ALL_TO_ALL),
    _Since(QWEN_30B, "B200", ANY, (26, 2, 1), ONCE),
    _Since(QWEN_30B, "B200", "fp8", (26, 6, 1), WHOLE),
    _Since(QWEN_30B, "B300", ANY, (26, 2), ONCE),
    _Since(QWEN_30B, "B300", "fp8", (26, 6), WHOLE),
    _Since(QWEN_30B, "GB", ANY, (25, 11), ONCE),
    _Since(QWEN_30B, "GB", "fp8", (26, 6), WHOLE),
)
# Models and GPUs whose recipes run modules again, and the first release of which that is no longer
# so in fp8.
AGAIN = (
    (GPT_OSS, "GB200", (26, 6)),
    (GPT_OSS, "B200", None),
    (GPT_OSS, "H100", None),
    (DEEPSEEK, "GB300", (26, 6)),
    (DEEPSEEK, ANY, None),
)


def recipe_way(model: str, row: PublishedRow) -> Way:
    """The recipe's way for the row's release, GPU and precision; all-to-all where none is known."""
    ran, precision = _release(row), row.precision or "bf16"
    found = [
        one.way
        for one in RECIPES
        if one.model == model
        and row.gpu.startswith(one.gpu)
        and one.precision in (ANY, precision)
        and one.release <= ran
    ]
    return found[-1] if found else ALL_TO_ALL


def runs_modules_again(model: str, row: PublishedRow) -> bool:
    """Whether the recipe recomputes some of a block's modules."""
    for name, gpu, until in AGAIN:
        if name == model and row.gpu.startswith(gpu):
            return not (until and row.precision == "fp8" and until <= _release(row))
    return False


def _release(row: PublishedRow) -> tuple[int, ...]:
    """The container that the row's framework names, such as (26, 4, 1); () where it names none."""
    found = re.search(r"\b(\d\d)\.(\d\d)(?:\.(\d\d))?", row.framework)
    return tuple(int(part) for part in found.groups() if part) if found else ()
