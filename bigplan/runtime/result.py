"""What a worker hands back: after each step, and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bigplan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of the state after `step` steps that was finished, or, with `error`, failed."""

    step: int
    path: Path
    nbytes: int
    seconds: float  # from its first action to its name
    error: str = ""

    @property
    def message(self) -> str:
        """What to tell of one that failed."""
        return (
            f"the checkpoint {self.path} could not be written ({self.error}); those before it are "
            "untouched. Free space there, or keep fewer checkpoints"
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step as measured on one rank; `loss` is the global batch's mean."""

    step: int
    loss: float
    seconds: float
    timeline: Timeline
    learning_rate: float = 0.0  # of this step's update, also where the next step applies it
    gradient_norm: float | None = None  # before clipping; None: not computed, or not finite
    loss_scale: float | None = None  # in fp16
    skipped: bool = False  # gradients were not finite: this step changes no weight
    not_finite: tuple[int, ...] = ()  # layers with such gradients, of all ranks
    saved: tuple[Saved, ...] = ()  # checkpoints that ended, well or not, by the end of this step
    data_seconds: float = 0.0  # seconds for which compute waited for data
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes so far at most, by tier
    rewards: Mapping[str, float] | None = None  # of pairs of responses; None: none are learned from
    counted: int = 1  # targets, or pairs, that the loss is the mean of; of none it is 0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The mean loss over the validation's batches, and rewards as StepResult has them."""

    loss: float
    rewards: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class PairData:
    """Data whose log-probabilities under the starting weights are wanted."""

    fingerprint: str
    pairs: int
    wanted: int  # of them, the first so many
    steps: int  # global batches that these are in


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is, told while it works: `ended` grows with everything that it gets done."""

    ended: int = 0
    doing: tuple[str, ...] = ()  # what is under way, such as "backward of layer 3"


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a run: measured peak bytes by tier, remarks, a digest of the final weights."""

    memory: Mapping[str, int]
    notes: tuple[str, ...]
    digest: str
