"""How training frameworks run the same arithmetic: what they fuse, overlap and wait for.

A behaviour is what a framework's code does, whatever the site. Each one is stated once, from the
framework's documentation or source. Its few numbers are fitted to all published runs of that
framework together (benchmarks/fit_constants.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bigplan.spec.gpu import FlashKernel
from bigplan.spec.step import StepOp

# Norms and gates of models in plain torch.
PLAIN = frozenset({StepOp.NORM, StepOp.ACTIVATION})


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework's behaviour. Shares are of a collective's seconds."""

    name: str
    # Products' rate within a step over their rate one after the other. Other kernels refill the
    # cache between products, and some products add to fp32 sums of gradients.
    gemm_share: float = 1.0
    # Share of the bytes that chains of plain torch kernels move beyond one kernel's, for norms,
    # activations and rotary embedding: 0 if each is one kernel, 1 if none is.
    eager: float = 0.0
    # Steps that are chains of plain torch kernels, which keep more for the backward.
    chains: frozenset[StepOp] = frozenset()
    fused_norms: bool = False  # norms are one kernel each, whatever `eager` says
    turns_by_torch: bool = False  # rotary positions whose cos and sin have a factor (YaRN)
    pads_products: bool = False  # to sides of whole 16-byte loads
    compiled_loss: bool = False  # one kernel from logits to their gradient
    compiles_loss: bool = False  # torch.compile makes it
    in_place: bool = (
        False  # kernels keep no temporaries, products add to gradients (graph: `fused`)
    )
    attention: tuple[FlashKernel, ...] = ("flash2",)  # kernels, most preferred first
    stops_early: bool = False  # full recomputation ends where the last operator has its input
    # Host seconds per launch, relative to the GPU's launch_overhead; None: as the native runtime,
    # by operator (operator_overhead, action_overhead).
    host: float | None = 1.0
    tensor_exposed: float = 1.0  # tensor-parallel collectives that GEMMs wait for
    tensor_exposed_async: float = 1.0  # the same with asynchronous tensor parallelism
    beside_weights: bool = False  # sums of input gradients run beside the weight's gradient
    # Column-parallel products that sum the gradient of one input each: of attention and of a gated
    # MLP. (1, 1) where queries, keys and values are one product, and gate and up another.
    inputs_summed: tuple[int, int] = (1, 1)
    gathers_for_adapters: bool = False  # of column-parallel products, beside what these gather
    whole_logits: bool = False  # every tensor-parallel rank takes the loss over all words
    current_scaling: bool = False  # casts to 8 bits look for the largest value first
    folds_experts: bool = True  # tensor-parallel ranks have whole experts, not a part of each
    dispatches_once: bool = False  # a token goes once to each node and rank with its experts
    pads_rows: bool = False  # and its rows are padded for products in 8 bits after that
    dispatches_beside: bool = False  # beside the compute of another micro-batch
    dispatch_hidden: float = 1.0  # of these exchanges, the part that compute hides
    fused_experts: bool = False  # experts as in graph/fused_experts.py
    mxfp8_attention: bool = False  # of these blocks
    # Compute loses what the GPU's description says beside collectives of data parallelism. Others'
    # exposed shares are fitted to steps that have lost it.
    loses_beside: bool = False
    gather_exposed: float = 0.0  # ZeRO-3 gathers, even if compute is long enough
    regather_exposed: float = 0.0  # ZeRO-3 gathers before the backward
    reduce_exposed: float = 1.0  # gradient reductions
    reduce_scatters: bool = True  # ZeRO 1 and 2 scatter the sums; else every rank gets all of them
    sums_once: bool = False  # ZeRO 2 and 3 sum over zero groups once a step, not every micro-batch
    # Of zero groups' sums, each block's stays beside the step's until a backward ends.
    keeps_sums: bool = False
    shards_masters: bool = False  # ZeRO 3 has parameters in fp32 alone, and casts what it gathers
    # Gathers of parameters that ZeRO 1 and 2 updated; None: as much as of gradient reductions.
    owned_exposed: float | None = None
    send_exposed: float = 1.0  # messages between pipeline stages
    gather_launches: float = 0.0  # host work per tensor that ZeRO-3 gathers, in launches
    bucket_elements: int = 0  # elements in a bucket of a collective
    live_elements: int = 0  # elements that ZeRO-3 keeps gathered
    bucket_copies: bool = False  # replicas' gradients lie in buckets beside the parameters' own
    weighs_stages: bool = False  # blocks go to pipeline stages by weights, the head's among them
    updated_elements: int = 0  # elements whose gradients ZeRO-3 copies at once on the GPU
    update_tensors: int = 0  # bytes an element in the update, gradients among them; 0: as summed
    offloaded_gradient: int = 0  # bytes an element that leave for the CPU's update; 0: as summed
    # ZeRO 2's gradients for a CPU update lie on the host between micro-batches; the GPU adds them.
    sums_on_gpu: bool = False
    update_bytes: int = 0  # a CPU update's passes over gradients besides AdamW's, per parameter
    summed_on_cpu: float = 0.0  # bytes/s of gradients that leave the GPU to be summed; 0: nothing
    at_once: bool = False  # a stage's adapters are one tensor, which stays whole on every rank
    gradients_stay: bool = False  # gradients are on the GPU, even if the CPU updates
    one_numa_domain: bool = False  # a rank's CPU update uses one NUMA domain only
    captures: bool = False  # CUDA graphs can repeat the passes of blocks
    captured: bool = False  # CUDA graphs repeat them: the host launches each pass once
    waits: bool = False  # within a pass the host waits for the device, so that both work in turn


NATIVE = Framework(
    "native",
    host=None,
    stops_early=True,
    attention=("sdpa", "flash3", "flash2"),
    loses_beside=True,
    reduce_exposed=0.0,
    send_exposed=0.0,
    captures=True,
    folds_experts=False,
    at_once=True,
)

# Megatron-LM before 2023, and Megatron-DeepSpeed: nothing overlaps. A launch costs 48 us of Python,
# autograd and driver.
MEGATRON = Framework("Megatron-LM", host=9.62, reduce_scatters=False)
MEGATRON_DEEPSPEED = replace(
    MEGATRON, name="Megatron-DeepSpeed", bucket_elements=2 * 500_000_000
)  # reduce_bucket_size and allgather_bucket_size

# Megatron Core with Transformer Engine: gradients are reduced during the backward; where asked to,
# tensor-parallel collectives are split and pipelined with GEMMs. Where not, column-parallel layers
# launch the sum of the input's gradient, and wait for it after the weight's (`dgrad_work` in
# transformer_engine/pytorch/module/linear.py).
MEGATRON_CORE = Framework(
    "Megatron Core",
    attention=("cudnn", "flash3", "flash2"),
    turns_by_torch=True,
    compiled_loss=True,  # `cross_entropy_loss_fusion`, on in Megatron-Bridge's recipes
    gemm_share=0.967,
    tensor_exposed_async=0.029,
    beside_weights=True,
    reduce_exposed=0.4,
    send_exposed=0.5,
    gradients_stay=True,  # its buffers of gradients live as long as the model
    sums_once=True,  # Megatron FSDP reduces over its outer group with the last micro-batch alone
)

# FSDP with its defaults: the next layer is gathered while this one computes. With CPUOffloadPolicy
# gradients of all micro-batches but the first go to memory that is not page-locked. The GPU waits
# while torch adds them there. The rate lies between those of two runs on an H200's machine, 1.58
# and 1.29 GB/s: the time that the other parts leave
# (benchmarks/results/2026-11-22-h200-rows-apart). A part of the gradients that replicas have summed
# lives until finalize_backward (FSDPParamGroup._all_reduce_state).
SUMMED_ON_CPU = 1.43e9  # bytes/s
FSDP = Framework(
    "FSDP",
    host=2.0,
    gather_exposed=0.0055,
    regather_exposed=0.0055,
    reduce_exposed=0.0055,
    tensor_exposed_async=0.68,
    summed_on_cpu=SUMMED_ON_CPU,
    keeps_sums=True,
    shards_masters=True,
)

# FSDP's first version around peft's adapters. Each matrix that trains is a unit of its own, inside
# its block's unit (`fsdp_auto_wrap_policy` of peft, `get_wrapping_policy` of fsdp_qlora): a block
# with six adapters has 13 units. The host waits until all but two units are freed
# (`_FreeEventQueue`, by `limit_all_gathers`). So it asks for the next block's gather only when the
# GPU has reached this block's last adapter, forward, and the keys' adapter, backward. Only the rest
# of the block can hide the gather. It is a few percent of a pass, and counts as nothing.
FSDP_PEFT = replace(FSDP, name="FSDP with peft", gather_exposed=1.0, regather_exposed=1.0)

# Plain PyTorch loops, whatever their name. Gradients are reduced during the backward, as by
# DistributedDataParallel. What ZeRO 1 or 2 updated is gathered before the next step begins: that is
# the default of DeepSpeed, Megatron-LM (`overlap_param_gather`) and InternEvo
# (`overlap_sync_param`). DistributedDataParallel's buckets are copies of the gradients unless it is
# asked for views (`gradient_as_bucket_view`).
PYTORCH = replace(
    FSDP,
    name="PyTorch",
    owned_exposed=1.0,
    bucket_copies=True,
    keeps_sums=False,
    shards_masters=False,
)

# Hugging Face's nanotron: norms and rotary positions are fused kernels, the gate is not
# (`TritonRMSNorm`, `GLUActivation`). Gradients are summed in fp32 buffers of its own.
NANOTRON = replace(
    PYTORCH,
    name="nanotron",
    chains=frozenset({StepOp.ACTIVATION}),
    bucket_copies=False,
    weighs_stages=True,
)

# InternEvo casts its part of the gradients to fp32 in one tensor and lets the 16-bit ones go
# (`HybridZeroOptimizer`). torch 1.13's AdamW, which is not fused, then holds the second moment's
# root and the denominator, each as large. Under FSDP 16-bit gradients stay beside fp32 ones, and
# AdamW goes from tensor to tensor (`FSDPadaptOptimizer`). Its guide installs FlashAttention 1.0.5,
# from its first commit on.
INTERN_EVO = replace(
    PYTORCH, name="InternEvo", attention=("flash1", "flash2"), update_tensors=4 + 4 + 4
)
INTERN_EVO_FSDP = replace(INTERN_EVO, update_tensors=2 + 4)

# Aleph Alpha's Scaling: gate and up are two column-parallel products, each of which sums its
# input's gradient (`ParallelSwiGLUMLP`). The head's gathers the logits of all words
# (`TransformerLMHead`, `parallel_output=False`), and every rank takes their loss. Gradients are
# summed in the parameters' precision; after the last micro-batch all ranks sum whole ones in fp32
# (`allreduce_tensor_in_float32`).
SCALING = replace(
    PYTORCH,
    name="Scaling",
    inputs_summed=(1, 2),
    whole_logits=True,
    reduce_exposed=1.0,
    reduce_scatters=False,
    bucket_elements=500_000_000,
)

# Composer asks FSDP for BACKWARD_POST: the next gather starts when a layer's gradients are done, on
# the communicator that then reduces them. So most of its collectives are not hidden. Its runs are
# of 2023: FlashAttention is the first version (on A100s as a Triton kernel), and most norms and
# activations are one kernel each.
COMPOSER = Framework(
    "Composer",
    compiled_loss=True,  # `loss_fn: fused_crossentropy`, the default of its MPT
    attention=("flash1", "flash2"),
    gemm_share=0.97,
    eager=0.23,
    host=2.0,
    gather_exposed=0.31,
    regather_exposed=0.77,
    reduce_exposed=0.77,
)

# Hugging Face models under DeepSpeed: eager blocks; every module's parameters are fetched and
# released by hooks in Python. Before AdamW the CPU update reads each fp32 gradient for the norm (4
# bytes) and scales it (8 bytes). Its pinned buffers lie in the NUMA domain where the process began.
DEEPSPEED = Framework(
    "DeepSpeed",
    eager=1.0,
    chains=PLAIN,
    host=13.0,
    gather_exposed=1.0,
    regather_exposed=1.0,
    reduce_exposed=1.0,
    gather_launches=3.8,
    bucket_elements=2 * 500_000_000,  # reduce_bucket_size, and its copy in the order of ranks
    live_elements=1_000_000_000,  # stage3_max_live_parameters
    updated_elements=1_000_000_000,  # sub_group_size
    offloaded_gradient=4,  # cast to fp32 on the GPU, then copied
    sums_on_gpu=True,  # `async_accumulate_grad_in_cpu_via_gpu`; stage 3's are beside the backward
    update_bytes=12,
    one_numa_domain=True,
)

# llm.q, in C++: a step is one CUDA graph, so launches cost next to nothing. Every chain is one
# kernel, and the loss takes a chunk of tokens at a time. Gradients are reduced, and parameters
# gathered, while the next layer computes.
LLMQ = Framework(
    "llm.q",
    attention=("cudnn", "flash2"),
    compiled_loss=True,
    in_place=True,
    host=0.2,
    reduce_exposed=0.0,
    send_exposed=0.0,
)
