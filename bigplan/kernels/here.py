"""The GPU of this machine, as kernels are sized for it, and where generated kernels run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from bigplan.kernels.fusion.price import Pricer
from bigplan.spec.gpu import find_gpu
from bigplan.spec.multiprocessor import closest_to, find_multiprocessor, named_as

PLANNED_FOR = "h200-sxm"  # where there is no GPU to ask


def gpu_here() -> str:
    """The described GPU type that kernels are sized for on this machine.

    That of its GPU, else the one of the closest compute capability; PLANNED_FOR without a GPU.
    """
    if not torch.cuda.is_available():
        return PLANNED_FOR
    named = named_as(torch.cuda.get_device_name())
    return named or closest_to(*torch.cuda.get_device_capability())


def pricer_for(gpu: str) -> Pricer:
    """Prices of a shipped GPU type. Raises InputError."""
    return Pricer(find_gpu(gpu), find_multiprocessor(gpu))


def runs_kernels(devices: set[str]) -> bool:
    """Whether generated kernels run on tensors there: on CUDA, or in Triton's interpreter.

    Elsewhere the same groups run torch's operators one after another.
    """
    if find_spec("triton") is None:
        return False
    return devices == {"cuda"} or os.environ.get("TRITON_INTERPRET") == "1"
