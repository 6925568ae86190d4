"""A plain training loop of transformers' Llama, all on the GPU: what a plan has to keep up with.

    python -m benchmarks.plain_loop llama-like-5.5b --micro-batch 2 [--compile model]

fp32 master weights and moments, bf16 compute, fp32 sums of gradients, SDPA, fused AdamW, clipping.
With --weights bf16 the model's weights are bf16 and so is what flows between its blocks; after each
backward their gradients are added to those of the fp32 masters. With --weights autocast the model's
weights are the masters, and what flows between blocks is fp32. --compile is torch.compile of each
block, or of the whole model with its loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from benchmarks.peers import frame


def masters_of(model: nn.Module) -> list[Tensor]:
    """Make the weights bf16; returns their fp32 masters, to which gradients are added."""
    masters: list[Tensor] = []
    for weight in model.parameters():
        master = nn.Parameter(weight.data)
        weight.data = weight.data.bfloat16()
        weight.register_post_accumulate_grad_hook(into(master))  # type: ignore[no-untyped-call]
        masters.append(master)
    return masters


def into(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that moves a weight's gradient into its master's."""

    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    return add


def prepare(args: argparse.Namespace) -> Callable[[list[Tensor]], Tensor]:
    """The model on the device, and the function that trains one step."""
    model = frame.build_model(args)
    weights: list[Tensor] = list(model.parameters())
    bf16 = args.weights == "bf16"
    masters = masters_of(model) if bf16 else weights
    optimizer = torch.optim.AdamW(
        masters, lr=frame.LEARNING_RATE, weight_decay=frame.WEIGHT_DECAY, fused=True
    )
    if args.compile == "layers":
        frame.compile_layers(model)
    elif args.compile == "model":
        model.compile()

    def train(batches: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=args.device)
        for words in batches:
            with nullcontext() if bf16 else torch.autocast(args.device, torch.bfloat16):
                loss = frame.loss_of(model, words) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(masters, frame.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if bf16:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        return total

    return train


def main() -> None:
    """Read the command line and measure."""
    parser = frame.parser(__doc__)
    parser.set_defaults(recompute="none")
    parser.add_argument("--weights", choices=["bf16", "autocast"], default="bf16")
    parser.add_argument("--compile", choices=["none", "layers", "model"], default="none")
    args = frame.parse(parser)
    frame.measure("plain", args, lambda: prepare(args))


if __name__ == "__main__":
    main()
