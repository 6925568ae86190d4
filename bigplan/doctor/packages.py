"""Versions, packages of each extra, and the engines that they provide."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

from bigplan.commit import full_version
from bigplan.doctor.finding import Finding
from bigplan.engines import ENGINES
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.installed import LAUNCH, missing, version_of
from bigplan.solve.ilp import highs_available, solver_name

TOPIC, ENGINE = "installed", "engines"

EXTRAS: dict[str, dict[str, str]] = {
    "launch": {
        **dict.fromkeys(LAUNCH, "launches"),
        "tensorboardX": "TensorBoard files of runs",
    },
    "deepspeed": {"deepspeed": "engine deepspeed"},
    "data": {
        "tokenizers": "tokenizer.json in `bigplan data prepare`",
        "pyarrow": "Parquet",
    },
    "report": {"vl-convert-python": "pages and pictures of `bigplan report`"},
    "kernels": {"triton": "fused kernels on a GPU"},
    "wandb": {"wandb": "`--wandb`"},
}
"""extra: the packages that it installs, each with what there is not without it"""


def examine() -> Iterator[Finding]:
    """Versions, packages and engines."""
    yield Finding(TOPIC, "bigplan", "good", full_version())
    yield Finding(TOPIC, "Python", "good", f"{platform.python_version()} on {platform.system()}")
    yield _solver()
    for extra, purposes in EXTRAS.items():
        yield _extra(extra, purposes)
    for name, engine in ENGINES.items():
        lacking = engine.missing()
        if lacking is None:
            yield Finding(ENGINE, name, "good", "planned, and run with `bigplan launch`")
        else:
            told, _, remedy = lacking.partition("; ")
            yield Finding(
                ENGINE, name, "note", f"planned alone: {told}", remedy.removeprefix("run: ")
            )
    told = f"{', '.join(FRAMEWORKS)}: planned, and written by `bigplan config`"
    yield Finding(ENGINE, "other tools", "good", told)


def _solver() -> Finding:
    if highs_available():
        return Finding(TOPIC, "solver", "good", solver_name())
    return Finding(
        TOPIC,
        "solver",
        "note",
        f"HiGHS is missing: {solver_name()} solves instead, more slowly",
        "pip install 'highspy<1.16'",
    )


def _extra(extra: str, purposes: Mapping[str, str]) -> Finding:
    here = [name for name in purposes if missing((name,), extra) is None]
    told = [", ".join(f"{name} {version_of(name) or 'of unknown version'}" for name in here)]
    for purpose in dict.fromkeys(purposes.values()):
        lacking = [name for name in purposes if purposes[name] == purpose and name not in here]
        told += [f"without {', '.join(lacking)}: no {purpose}"] if lacking else []
    if len(here) == len(purposes):
        return Finding(TOPIC, extra, "good", told[0])
    remedy = f"pip install 'bigplan[{extra}]'"
    return Finding(TOPIC, extra, "note", "; ".join(filter(None, told)), remedy)
