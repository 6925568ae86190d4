"""Prompts and responses of very different lengths: the loss counts a part of every micro-batch."""

from __future__ import annotations

from pathlib import Path

from bigplan.data.prepare import Preparation, prepare
from bigplan.data.sources import Fields
from bigplan.spec.training import Training, ValidationSpec
from tests.data.texts import write_pairs
from tests.runtime.plans import LENGTH, tiny_training

# A prompt of three windows and more: windows, and chunks of the loss, without a single target.
PAIRS = [(f"prompt {i} " * (1 + 7 * (i % 4 == 0)), f"answer {i} " * (i % 3)) for i in range(12)]


def prepare_masked(folder: str | Path) -> Path:
    """The prepared pairs in a folder of their own."""
    source = write_pairs(Path(folder) / "pairs.jsonl", PAIRS)
    fields = Fields(prompt="prompt", response="response")
    prepare(Preparation((source,), fields), masked_data(folder))
    return masked_data(folder)


def masked_data(folder: str | Path) -> Path:
    """Where they are."""
    return Path(folder) / "pairs"


def masked_training(global_batch: int, data: str, **changes: object) -> Training:
    """Trains and validates on the same pairs; more batches are asked for than there are."""
    validation = ValidationSpec(data=data, every=1, batches=1000)
    return tiny_training(
        global_batch, data=data, validation=validation, sequence_length=LENGTH, **changes
    )
