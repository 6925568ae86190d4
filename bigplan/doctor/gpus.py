"""GPUs as the driver and as torch see them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from bigplan.doctor.finding import Finding
from bigplan.errors import InputError
from bigplan.spec.catalog import find_gpu, list_gpus
from bigplan.spec.detect.machine import FoundGpu, find_gpus
from bigplan.units import format_bytes

TOPIC = "GPUs"
_SECONDS = 120.0  # allowed for torch's start, which takes minutes on a network drive

# It runs in a process of its own, which an unfit driver can end or hang. Each device multiplies
# once, because torch sees a GPU even if it has no kernels for the GPU's generation.
_PROBE = """
import json, torch
found = {"cuda": torch.version.cuda or torch.version.hip, "devices": []}
for index in range(torch.cuda.device_count()):
    try:
        one = torch.ones((64, 64), device=f"cuda:{index}")
        problem = "" if float((one @ one)[0, 0]) == 64.0 else "a product came out wrong"
    except Exception as error:
        problem = str(error).splitlines()[0]
    found["devices"].append(problem)
print(json.dumps(found))
"""


def examine() -> Iterator[Finding]:
    """The driver's GPUs, those of them that are described, and torch's view of them."""
    try:
        gpus = find_gpus()
    except InputError as error:
        found, _, remedy = str(error).partition("; ")
        yield Finding(TOPIC, "driver", "bad", found, remedy)
        return
    if not gpus:
        yield Finding(
            TOPIC,
            "driver",
            "note",
            "nvidia-smi lists no GPU: plans can be made for any cluster, and CPU devices train "
            "small models",
            "with a GPU in the machine, install NVIDIA's driver, and give a container `--gpus all`",
        )
    else:
        yield Finding(TOPIC, "driver", "good", _listed(gpus))
        yield from _described(gpus)
    if find_spec("torch") is not None:
        yield torch_finding(len(gpus), _probed())


def _listed(gpus: tuple[FoundGpu, ...]) -> str:
    kinds = Counter((gpu.name, gpu.memory) for gpu in gpus)
    return ", ".join(
        f"{number} x {name} with {format_bytes(memory)}" for (name, memory), number in kinds.items()
    )


def _described(gpus: tuple[FoundGpu, ...]) -> Iterator[Finding]:
    """Whether the planner knows rates of these GPUs."""
    known = {find_gpu(name).name: name for name in list_gpus()}
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        if name in known:
            yield Finding(TOPIC, "description", "good", f"{name} is shipped as {known[name]}")
        else:
            yield Finding(
                TOPIC,
                "description",
                "note",
                f"{name} is no shipped GPU type: `bigplan detect` takes another one's rates",
                "bigplan profile --out my-cluster.yaml measures its own",
            )


def _probed() -> dict[str, Any] | str:
    """Report of torch about its devices, or why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            check=False,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found
    except subprocess.TimeoutExpired:
        return f"it had not started after {_SECONDS:.0f} s"
    except (OSError, ValueError, IndexError) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ended with {done.returncode}"


def torch_finding(listed: int, found: dict[str, Any] | str) -> Finding:
    """What torch sees, as `_PROBE` reports it, of the GPUs that the driver lists."""
    if isinstance(found, str):
        remedy = "run: python -c 'import torch', and install torch again where that fails"
        return Finding(TOPIC, "torch", "bad", f"torch cannot be asked: {found}", remedy)
    wrong = [f"GPU {n}: {problem}" for n, problem in enumerate(found["devices"]) if problem]
    if wrong:
        remedy = "install a torch for this GPU and driver: https://pytorch.org/get-started/locally"
        return Finding(TOPIC, "torch", "bad", "; ".join(wrong), remedy)
    devices = len(found["devices"])
    if devices:
        told = f"computes on {devices} of {listed or devices} (CUDA {found['cuda']})"
        if devices < listed:
            hidden = "CUDA_VISIBLE_DEVICES hides the others; unset it to use all"
            return Finding(TOPIC, "torch", "note", told, hidden)
        return Finding(TOPIC, "torch", "good", told)
    if not listed:
        return Finding(TOPIC, "torch", "good", "computes on the CPU")
    if found["cuda"] is None:
        remedy = "install a CUDA build: https://pytorch.org/get-started/locally"
        return Finding(TOPIC, "torch", "bad", "this torch is built for CPUs alone", remedy)
    return Finding(
        TOPIC,
        "torch",
        "bad",
        f"torch, built for CUDA {found['cuda']}, sees none of the GPUs",
        "update the driver to one for that CUDA, or unset CUDA_VISIBLE_DEVICES",
    )
