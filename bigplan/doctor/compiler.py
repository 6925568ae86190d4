"""The C++ compiler: the CPU's update is compiled for the machine that it runs on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from bigplan.doctor.finding import Finding
from bigplan.spec.detect.machine import COMPILERS, cache_folder, compiler

TOPIC = "compiler"
_CACHE = "name a folder in XDG_CACHE_HOME"


def examine() -> Iterator[Finding]:
    """The compiler, its cache folder, and what else DeepSpeed's operators need."""
    command = compiler()
    if command is None:
        yield Finding(
            TOPIC,
            "C++",
            "note",
            f"none of $CXX, {', '.join(COMPILERS)} is found: the CPU's update is torch's, slower",
            "apt install g++, or name one in CXX",
        )
    else:
        yield Finding(TOPIC, "C++", "good", f"{' '.join(command)}, for the CPU's update")
    if find_spec("deepspeed") is not None:
        yield _deepspeed(has_compiler=command is not None)
    yield _cache()


def _deepspeed(*, has_compiler: bool) -> Finding:
    """DeepSpeed compiles its operators, for minutes, when a plan first needs one."""
    missing = [*([] if has_compiler else ["a C++ compiler"])]
    if find_spec("ninja") is None and shutil.which("ninja") is None:
        missing.append("ninja")
    if missing:
        told = f"its CPU optimizer and drives cannot be compiled without {' and '.join(missing)}"
        return Finding(TOPIC, "DeepSpeed", "note", told, "apt install g++; pip install ninja")
    told = "its operators are compiled when a plan first needs one"
    return Finding(TOPIC, "DeepSpeed", "good", told)


def _cache() -> Finding:
    try:
        folder = cache_folder()
    except RuntimeError:
        return Finding(TOPIC, "cache", "note", "this user has no home folder", _CACHE)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(there, os.W_OK | os.X_OK):
        return Finding(TOPIC, "cache", "good", f"{folder} keeps what is compiled")
    told = f"{folder} cannot be written: every process compiles anew"
    return Finding(TOPIC, "cache", "note", told, _CACHE)
