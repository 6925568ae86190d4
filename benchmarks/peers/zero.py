"""DeepSpeed's ZeRO, ZeRO-Offload and ZeRO-Infinity on one GPU or several.

    python -m benchmarks.peers.zero llama-like-5.5b --stage 2 --pin native
    python -m benchmarks.peers.zero llama-like-3.3b --stage 3 --state nvme --parameters nvme

bf16 with fp32 master weights and moments in host memory (--state cpu) or on a drive (nvme), updated
by DeepSpeed's CPU Adam, with clipping. Gradients are summed over micro-batches in bf16, DeepSpeed's
default: less exact than the other peers, and fewer bytes to move.

--pin says how its host buffers are page-locked: "torch" through torch's allocator, which rounds
each up to a power of two, "native" in their own size by DeepSpeed itself, "none" not at all.
--ratio is the share of ZeRO-3's update that stays on the CPU (Twin-Flow), --superoffload updates
in a process of its own. --state gpu leaves it on the GPUs, by torch's fused AdamW. --meta shares
parameters out as they are made, under ZeRO-3: for models that one GPU does not hold.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.peers import frame

# Elements of a part of the optimizer step. In host memory the default of 1e9 is fine; parts that
# are read from a drive want STATE_BUFFERS of this size each, in fp32.
GROUP = {"gpu": int(1e9), "cpu": int(1e9), "nvme": int(1e8)}
# A part's weights, gradients and two moments, while the next is read and the last is written.
STATE_BUFFERS = 16
# Requests of 1 MiB, 32 at once.
AIO = {"block_size": 2**20, "queue_depth": 32, "overlap_events": True, "single_submit": False}
BLOCKS_LIVE = 2  # blocks whose parameters stay on the GPU where they live on a drive


class Sizes(NamedTuple):
    """What buffers are sized by."""

    largest: int
    """elements of the largest parameter"""
    block: int
    """elements of a block"""
    matrices: int
    """parameters of a block with more than one dimension"""


def sizes_of(model: LlamaForCausalLM) -> Sizes:
    """Those of a model."""
    block = list(model.model.layers[0].parameters())
    return Sizes(
        max(weight.numel() for weight in model.parameters()),
        sum(weight.numel() for weight in block),
        sum(weight.dim() > 1 for weight in block),
    )


def offload_config(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Where optimizer state and parameters live."""
    if args.state == "gpu":
        return {}
    pinned = args.pin != "none"
    state: dict[str, Any] = {"device": args.state, "pin_memory": pinned}
    if args.state == "nvme":
        state |= {"nvme_path": str(args.nvme), "buffer_count": STATE_BUFFERS}
        state |= {"pipeline_read": True, "pipeline_write": True}
    elif args.stage == 3:
        state |= {"ratio": args.ratio, "super_offload": args.superoffload}
    config = {"offload_optimizer": state}
    if args.parameters != "gpu":
        config["offload_param"] = {"device": args.parameters, "pin_memory": pinned}
    if args.parameters == "nvme":
        # A parameter takes a buffer of the largest one's size as long as it is on the GPU: those of
        # the live blocks and two more, the embedding and the head.
        count = (BLOCKS_LIVE + 2) * sizes.matrices + 2
        config["offload_param"] |= {"nvme_path": str(args.nvme), "max_in_cpu": 0}
        config["offload_param"] |= {"buffer_size": sizes.largest, "buffer_count": count}
    return config


def zero_config(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """DeepSpeed's "zero_optimization"."""
    config = {
        "stage": args.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": int(5e8),
        **offload_config(args, sizes),
    }
    if args.stage == 3:
        live, ahead = int(1e9), sizes.block
        if args.parameters == "nvme":
            # Fetching ahead from a drive fails in 0.19.8 where a parameter stands in the queue
            # twice, as the last of every forward does: "already assigned swap buffer id".
            live, ahead = BLOCKS_LIVE * sizes.block, 0
        config |= {
            "sub_group_size": args.sub_group or GROUP[args.state],
            "stage3_prefetch_bucket_size": ahead,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    return config


def ds_config(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """DeepSpeed's whole configuration."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": frame.micro_batches(args),
        "gradient_clipping": frame.CLIP,
        # Clipping looks at the norm anyway; a search for overflows would read all gradients again.
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": zero_config(args, sizes),
        "aio": AIO,
        "steps_per_print": 10**9,
    }


def environment(device: str, pin: str) -> None:
    """What DeepSpeed reads from it while it is imported and built."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native" if pin == "native" else "torch"
    for name, alone in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, alone)
    if device == "cuda":  # "9.0a", as images for the H200 set it, it cannot parse
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"


def prepare(args: argparse.Namespace) -> Callable[[list[Tensor]], Tensor]:
    """DeepSpeed's engine, and the function that trains one step."""
    environment(args.device, args.pin)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    frame.join("nccl" if args.device == "cuda" else "gloo")
    config = ds_config(args, sizes_of(frame.build_model(args, device="meta")))
    shared: AbstractContextManager[Any] = nullcontext()
    if args.meta:
        deepspeed.init_distributed()
        shared = deepspeed.zero.Init(config_dict_or_path=config)
    with shared:
        model = frame.build_model(args, reentrant=True)
    rates = {"lr": frame.LEARNING_RATE, "weight_decay": frame.WEIGHT_DECAY}
    if args.state == "gpu":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **rates)
    else:
        optimizer = DeepSpeedCPUAdam(model.parameters(), **rates)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train(batches: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=args.device)
        for words in batches:
            loss = frame.loss_of(engine, words)
            engine.backward(loss)
            engine.step()  # updates at the last micro-batch
            total += loss.detach() / len(batches)
        return total

    return train


def main() -> None:
    """Read the command line and measure."""
    parser = frame.parser(__doc__)
    parser.add_argument("--stage", type=int, choices=[2, 3], required=True)
    parser.add_argument("--state", choices=["gpu", "cpu", "nvme"], default="cpu")
    parser.add_argument("--parameters", choices=["gpu", "cpu", "nvme"], default="gpu")
    parser.add_argument("--pin", choices=["native", "torch", "none"], default="native")
    parser.add_argument("--nvme", type=Path, help="a folder on the drive")
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--superoffload", action="store_true")
    parser.add_argument("--meta", action="store_true", help="see above")
    parser.add_argument("--sub-group", type=int, help="elements of a part of ZeRO-3's update")
    args = frame.parse(parser)
    if args.stage == 2 and (args.state == "nvme" or args.parameters != "gpu"):
        parser.error("--stage 2 keeps parameters on the GPU and state in memory; use --stage 3")
    if args.meta and args.stage == 2:
        parser.error("--meta shares parameters out, which --stage 2 does not; use --stage 3")
    if "nvme" in (args.state, args.parameters) and args.nvme is None:
        parser.error("--state nvme and --parameters nvme need --nvme FOLDER")
    frame.measure("zero", args, lambda: prepare(args))


if __name__ == "__main__":
    main()
