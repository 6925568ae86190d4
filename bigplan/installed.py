"""Which packages of the extras are here: one answer for launches and for `bigplan doctor`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from bigplan.units import be

LAUNCH = ("torch", "ray", "safetensors")  # what every launch imports
BY_VERSION = ("deepspeed",)  # what they compile is kept in folders named after their version
_MODULES = {"vl-convert-python": "vl_convert"}  # of packages that are imported by another name


def version_of(package: str) -> str:
    """Its version as pip knows it; empty: pip did not install it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def missing(packages: tuple[str, ...], extras: str) -> str | None:
    """Why these packages cannot be used here, and what to install; None: they can."""
    remedy = f"run: pip install 'bigplan[{extras}]'"
    if absent := [n for n in packages if find_spec(_MODULES.get(n, n)) is None]:
        return f"{' and '.join(absent)} {be(len(absent))} not installed; {remedy}"
    for name in BY_VERSION:
        if name in packages and not version_of(name):
            told = f"{name} can be imported, but pip did not install it and knows no version"
            return f"{told}; {remedy}"
    return None
