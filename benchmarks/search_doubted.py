"""What strategies find that are simulated for their bounds, although their estimates are late.

Usage: python -m benchmarks.search_doubted [NUMBER ...]    (0 and 2: three minutes on a core)

Small models on one RTX 4090. A line per case: for each NUMBER of such strategies (search.DOUBTED)
the seconds of the best step, beside that of the first NUMBER, and the CPU seconds of the search.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from unittest.mock import patch

from bigplan.solve import search as module
from bigplan.solve.candidate import Workload
from bigplan.solve.search import Scope, search
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.hf.config import from_hf_config
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

SMOLLM3 = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rope_theta": 5e6,
    "tie_word_embeddings": True,
}
SHIPPED = "gemma-2-2b", "qwen3-4b", "llama-3.2-3b"
LENGTHS = 4096, 8192
BATCHES = 16, 64, 512


def models() -> list[ModelSpec]:
    """SmolLM3 3B, which does not ship, and models that do."""
    return [from_hf_config(SMOLLM3, "smollm3-3b/config.json"), *map(find_model, SHIPPED)]


def main() -> None:
    """A line per case."""
    group = find_cluster("rtx-4090-workstation").group
    numbers = [int(number) for number in sys.argv[1:]] or [0, 2]
    for model, length, batch in product(models(), LENGTHS, BATCHES):
        workload = Workload(model, Training(sequence_length=length, global_batch=batch), group)
        told, steps = f"{model.name:14s} {batch:4d} x {length}", list[float]()
        for number in numbers:
            start = time.process_time()
            with patch.object(module, "DOUBTED", number):
                steps.append(search(workload, Scope()).best.seconds)
            took = time.process_time() - start
            told += f"  {steps[-1]:9.3f} {steps[-1] / steps[0]:6.3f} {took:5.1f}"
        print(told, flush=True)


if __name__ == "__main__":
    main()
