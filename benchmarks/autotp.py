"""DeepSpeed's AutoTP training on gloo processes of this machine: does it run, are losses equal?

    python benchmarks/autotp.py

A tiny Llama of Hugging Face; bigplan's layers as DeepSpeed gets them; and the same with modules of
nn.Linear for the products of blocks, which AutoTP is told to split. Each by one process and by two
(`tensor_parallel: {autotp_size: 2}`), four steps of two micro-batches by AdamW. Prints losses,
parameters on the first rank, and how it ends where it fails. Needs transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

CASES = (
    ("hf", 0, "fp32"),
    ("hf", 1, "fp32"),
    ("hf", 2, "bf16"),
    ("hf", 3, "fp32"),
    ("bigplan", 0, "fp32"),
    ("linears", 0, "fp32"),
    ("linears", 1, "fp32"),
    ("linears", 3, "fp32"),
)
SPLIT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
    ],
}
STEPS, MICRO_BATCHES, BATCH, LENGTH, VOCAB = 4, 2, 2, 32, 256
SECONDS = 300.0


def main() -> None:
    for kind, stage, precision in CASES:
        for ranks in (1, 2):
            print(f"{kind}, ZeRO {stage}, {precision}, {ranks} process(es)", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                print(_ran(kind, stage, precision, ranks, folder), flush=True)


def _ran(kind: str, stage: int, precision: str, ranks: int, folder: str) -> str:
    """What the first rank prints, or the last line of its error."""
    told = (kind, str(stage), precision, str(ranks), f"{folder}/meeting")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *told],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    out, errors = processes[0].communicate(timeout=SECONDS)
    for other in processes[1:]:
        other.communicate(timeout=SECONDS)
    if processes[0].returncode:
        lines = [line for line in errors.splitlines() if "Error" in line]
        return f"  fails: {lines[-1] if lines else errors[-300:]}"
    return "\n".join(f"  {line}" for line in out.splitlines() if line.startswith(("step", "rank")))


def _rank(rank: int, kind: str, stage: int, precision: str, ranks: int, meeting: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    from bigplan.runtime.deepspeed.ops import import_deepspeed

    torch.set_num_threads(1)
    import_deepspeed()
    import deepspeed

    store = dist.FileStore(meeting, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    made = {"hf": _hugging_face, "bigplan": _bigplan, "linears": _linears}
    model = made[kind](dtype)
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "bf16": {"enabled": precision == "bf16"},
    }
    if ranks > 1:
        config["tensor_parallel"] = {"autotp_size": ranks}
        if kind == "linears":
            config["tensor_parallel"] = {"autotp_size": ranks, "partition_config": SPLIT}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    sizes = [getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters()]
    print(f"rank {rank} has {sum(sizes):,} parameters", flush=True)
    _train(engine, _loss_of_hf if kind == "hf" else _loss_of_bigplan)
    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process whose Python finalises (pytorch#179291)


def _train(engine: Any, loss_of: Callable[..., Any]) -> None:
    import torch

    torch.manual_seed(1)
    for step in range(STEPS):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            made = loss_of(engine, torch.randint(0, VOCAB, (BATCH, LENGTH)))
            engine.backward(made)
            engine.step()
            total += made.item() / MICRO_BATCHES
        print(f"step {step + 1}: loss {total:.7f}", flush=True)


def _hugging_face(dtype: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads)).to(dtype)


def _bigplan(dtype: Any) -> Any:
    from bigplan.runtime.deepspeed.model import Model
    from bigplan.runtime.weights.first_values import first_values, whole_values
    from bigplan.spec.catalog import find_model
    from bigplan.spec.training import Training

    spec = find_model("tiny-llama-test")
    first = first_values(spec, Training(sequence_length=LENGTH, global_batch=4, precision="fp32"))
    return Model(spec, lambda *of: whole_values(first, *of), dtype, recompute=False, chunk=LENGTH)


def _linears(dtype: Any) -> Any:
    """The same model, whose blocks have modules for their products."""
    from torch import nn

    from bigplan.runtime.layers import blocks

    model = _bigplan(dtype)

    def of(block: Any) -> Any:
        for name in [name for name, _ in block.named_parameters() if "_proj__" in name]:
            weight = getattr(block, name)
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
            linear.weight = weight
            delattr(block, name)
            setattr(block, name.removesuffix("__weight"), linear)
        ways = blocks.Ways(linears=lambda p, names, x: tuple(getattr(block, n)(x) for n in names))
        block.forward = lambda x, *tables: blocks.block(
            block.named(), x, block._model, tables, ways
        )
        return block

    for block in model.layers[1:-1]:
        of(block)
    return model


def _loss_of_hf(engine: Any, tokens: Any) -> Any:
    return engine(input_ids=tokens, labels=tokens).loss


def _loss_of_bigplan(engine: Any, tokens: Any) -> Any:
    return engine(tokens, tokens) / (BATCH * LENGTH)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _rank(
            int(sys.argv[1]),
            sys.argv[2],
            int(sys.argv[3]),
            sys.argv[4],
            int(sys.argv[5]),
            sys.argv[6],
        )
    else:
        main()
