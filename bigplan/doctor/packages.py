"""Versions, packages of each extra, and the engines that they provide."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from bigplan.commit import full_version
from bigplan.doctor.finding import Finding
from bigplan.engines import ENGINES
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.solve.ilp import highs_available, solver_name

TOPIC, ENGINE = "installed", "engines"

EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "launch": (("torch", "ray", "safetensors", "tensorboardX"), "running plans"),
    "deepspeed": (("deepspeed",), "the engine deepspeed"),
    "data": (("tokenizers", "pyarrow"), "tokenizers and Parquet in `bigplan data prepare`"),
    "report": (("vl-convert-python",), "pages and pictures of `bigplan report`"),
    "kernels": (("triton",), "fused kernels on a GPU"),
    "wandb": (("wandb",), "`--wandb`"),
}
"""extra: the packages that it installs, and what they are for"""


def examine() -> Iterator[Finding]:
    """Versions, packages and engines."""
    yield Finding(TOPIC, "bigplan", "good", full_version())
    yield Finding(TOPIC, "Python", "good", f"{platform.python_version()} on {platform.system()}")
    yield _solver()
    for extra, (names, purpose) in EXTRAS.items():
        yield _extra(extra, names, purpose)
    for name, engine in ENGINES.items():
        missing = engine.missing()
        if missing is None:
            yield Finding(ENGINE, name, "good", "planned, and run with `bigplan launch`")
        else:
            told, _, remedy = missing.partition("; ")
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
        "pip install highspy",
    )


def _extra(extra: str, names: tuple[str, ...], purpose: str) -> Finding:
    found = {name: _version(name) for name in names}
    told = ", ".join(f"{name} {known}" for name, known in found.items() if known)
    missing = ", ".join(name for name, known in found.items() if not known)
    if not missing:
        return Finding(TOPIC, extra, "good", told)
    told = f"{told}; " if told else ""
    return Finding(
        TOPIC,
        extra,
        "note",
        f"{told}without {missing}: {purpose} needs it",
        f"pip install 'bigplan[{extra}]'",
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
