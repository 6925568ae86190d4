"""A plain training loop of Hugging Face's Llama, all on the GPU: what a plan has to keep up with.

Usage: plain_loop.py MODEL TOKENS_A_STEP [MICRO_BATCH]. fp32 parameters under bf16 autocast, SDPA,
fused AdamW, clipping, no recomputation, sequences of 4096; the largest micro-batch that fits of 4,
2 and 1 unless one is given. Prints the seconds of each step.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bigplan.spec.catalog import find_model

LENGTH, STEPS = 4096, 5


def train(name: str, tokens: int, micro_batch: int) -> list[float]:
    """Seconds of each step. Raises torch.OutOfMemoryError where the micro-batch does not fit."""
    spec = find_model(name)
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=LENGTH,
        use_cache=False,
        tie_word_embeddings=spec.tied_embeddings,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)
    batches = tokens // LENGTH // micro_batch
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batches):
            words = torch.randint(256, (micro_batch, LENGTH), device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=words, labels=words).loss / batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Train with the largest micro-batch that fits."""
    name, tokens, *given = sys.argv[1:]
    for micro_batch in map(int, given or ("4", "2", "1")):
        try:
            seconds = train(name, int(tokens), micro_batch)
        except torch.OutOfMemoryError:
            print(f"micro-batch {micro_batch}: out of memory", flush=True)
            torch.cuda.empty_cache()
            continue
        told = ", ".join(f"{s:.3f}" for s in seconds)
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{name}, {tokens} tokens a step, micro-batch {micro_batch}: {told} s, {peak:.1f} GiB"
        )
        return


if __name__ == "__main__":
    main()
