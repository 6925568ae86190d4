"""Rows written by hand."""

from bigplan.validate.rows import PublishedRow

PLAIN: dict[str, object] = {
    "id": "lab-001",
    "trust": "A",
    "gpu": "A100-80GB",
    "framework": "Megatron-LM",
    "n_gpus": 16,
    "layers": 24,
    "hidden": 2048,
    "seq_len": 1024,
    "global_batch": 64,
    "step_time_s": 2.0,
}


def row(**columns: object) -> PublishedRow:
    """A 1.3-billion-parameter model on 16 A100s with Megatron-LM, and what the test changes."""
    return PublishedRow.model_validate(PLAIN | columns)
