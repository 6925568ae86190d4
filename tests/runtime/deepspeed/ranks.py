"""Ranks that train cases one after the other through DeepSpeed: started by test_worker.py.

    python -m tests.runtime.deepspeed.ranks RANKS CASES.json MEETING

DeepSpeed keeps process groups for the life of a process, so all cases share one. Writes
CASES.json.RANK with what came of each. To import DeepSpeed takes 4 s of a core, so the ranks fork
from one process that has it, and the collector of cycles, which every engine calls a dozen times
for 0.2 s each, passes over what was imported.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from bigplan.plan import load_plan
from bigplan.runtime.deepspeed.worker import DeepSpeedWorker
from bigplan.runtime.parallel.groups import Groups

# What the first engine imports.
LATER = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")


@dataclass
class Case:
    """A plan to train, and what to do around it."""

    plan: str
    steps: int = 3
    resume: str = ""  # a checkpoint to begin from
    save: str = ""  # a folder for one after the second step
    evaluate: bool = False


class Staying(DeepSpeedWorker):
    """Joins once, and leaves with the process."""

    groups: Groups | None = None

    def _join(self, meeting: Path | Store) -> Groups:
        if Staying.groups is None:
            Staying.groups = super()._join(meeting)
        return replace(Staying.groups, at=self._at, strategy=self._plan.strategy)

    def _leave(self) -> None:
        """Not before the process does."""


def of_drives(worker: DeepSpeedWorker) -> Iterator[dict[str, int]]:
    """Bytes of host memory that state on a drive takes now: buffers, and what is in none."""
    swapper = getattr(worker._running().engine.optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    every = [t.compute_tensor for i in swapper.swap_params_info.values() for t in i.tensors]
    apart = [
        values for values in every if values.numel() and not swapper.aio_handle.is_pinned(values)
    ]
    yield {
        "buffers": sum(buffer.nbytes for buffer in swapper.swap_buffer_manager.all_buffers),
        "beside": sum(values.nbytes for values in apart),
        "elements": sum(info.numel() for info in swapper.swap_params_info.values()),
    }


def train(case: Case, rank: int, scratch: Path, meeting: Path) -> dict[str, object]:
    worker = Staying(load_plan(Path(case.plan)), rank, scratch)
    worker.preflight()
    begun = worker.start(meeting, Path(case.resume) if case.resume else None)
    found: dict[str, object] = {"begun": begun}
    losses, norms, swapping = [], [], list[dict[str, int]]()
    for number in range(case.steps):
        result = worker.step()
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        swapping.extend(of_drives(worker))
        if case.save and number == 1:
            found["saved"] = str(worker.save(Path(case.save)))
    if case.evaluate:
        found["evaluated"] = worker.evaluate()
    events = [(event.op, event.micro_batch) for event in result.timeline.events]
    found["swapping"] = swapping
    optimizer = worker._running().engine.optimizer
    found["groups"] = [int(n) for n in getattr(optimizer, "fp16_partitioned_groups_flat_numel", ())]
    found["ended"] = worker.progress().ended  # of all steps
    found |= {"losses": losses, "norms": norms, "events": events}
    finished = worker.finish()
    found |= {"digest": finished.digest, "measured": [str(tier) for tier in finished.memory]}
    worker.close()
    return found


def main() -> None:
    ranks, cases, meeting = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    first = next(iter(json.loads(cases.read_text()).values()))
    DeepSpeedWorker(load_plan(Path(first["plan"])), 0, cases.parent).preflight()  # imports it
    for name in LATER:
        import_module(name)
    gc.freeze()
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=run, args=(rank, cases, meeting), daemon=True)
        for rank in range(1, ranks)
    ]
    for process in others:
        process.start()
    run(0, cases, meeting)
    for process in others:
        process.join()
        assert process.exitcode == 0


def run(rank: int, cases: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, case in json.loads(cases.read_text()).items():
        scratch = cases.parent / f"scratch-{name}-{rank}"
        scratch.mkdir()
        results[name] = train(Case(**case), rank, scratch, meeting)
    Path(f"{cases}.{rank}").write_text(json.dumps(results))
    Staying.groups = None
    DeepSpeedWorker._leave(Staying.__new__(Staying))
    if rank:
        _leave()


def _leave() -> None:
    """Results are written, and the group is left.

    All the same a thread of gloo that drops a collective's last tensor while Python finalises would
    abort the process (pytorch#179291).
    """
    os._exit(0)


if __name__ == "__main__":
    main()
    _leave()
