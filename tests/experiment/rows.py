"""Rows by hand."""

from bigplan.experiment.folder import StudyEntry, StudyIndex
from bigplan.experiment.row import StudyRow


def row(speed: float = 1000.0, **more: object) -> StudyRow:
    """A planned row of 1,000 tokens a step; one node, a node-hour for what `speed` says."""
    figures: dict[str, object] = {
        "status": "planned",
        "model": "m",
        "parameters": 10,
        "cluster": "c",
        "nodes": 1,
        "engine": "native",
        "runs": True,
        "strategy": "one GPU",
        "bottleneck": "gpu compute",
        "tokens_per_step": 1000,
        "step_seconds": 1000.0 / speed,
        "tokens_per_second": speed,
        "gpu_bytes": 2**30,
        "node_hours_per_million_tokens": 1e6 / speed / 3600,
        "drive_bytes_per_million_tokens": 0.0,
    }
    return StudyRow.model_validate(figures | more)


def index(*values: dict[str, object], **more: object) -> StudyIndex:
    """An experiment with these points."""
    keys = tuple(dict.fromkeys(key for point in values for key in point))
    points = tuple(StudyEntry(key=f"{n:016x}", values=point) for n, point in enumerate(values))
    return StudyIndex.model_validate({"file": "f.yaml", "keys": keys, "points": points, **more})
