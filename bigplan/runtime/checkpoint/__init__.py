"""Checkpoints: written beside training, whole or not there, readable under any plan."""

from bigplan.runtime.checkpoint.folder import FoundCheckpoint, checkpoint_path, latest
from bigplan.runtime.checkpoint.reading import Reader
from bigplan.runtime.checkpoint.restore import check_frozen, check_same, restore
from bigplan.runtime.checkpoint.saver import Saver
from bigplan.runtime.manifest import Manifest

__all__ = [
    "FoundCheckpoint",
    "Manifest",
    "Reader",
    "Saver",
    "check_frozen",
    "check_same",
    "checkpoint_path",
    "latest",
    "restore",
]
