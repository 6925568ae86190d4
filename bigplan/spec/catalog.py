"""Finds models and clusters: a shipped name, a YAML file, or a Hugging Face config.json."""

from __future__ import annotations

import difflib
from pathlib import Path

from bigplan.errors import InputError
from bigplan.spec.cluster import Cluster
from bigplan.spec.document import load_document
from bigplan.spec.hf import load_hf_config
from bigplan.spec.model import ModelSpec

_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIXES = (".yaml", ".yml", ".json")


def _model_folder() -> Path:
    return _PACKAGE / "models"


def _cluster_folder() -> Path:
    """Inside the package when installed from a wheel, beside it in a checkout."""
    packaged = _PACKAGE / "cluster_configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "cluster_configs"


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def list_models() -> tuple[str, ...]:
    """Names of the shipped models, sorted."""
    return _names(_model_folder())


def list_clusters() -> tuple[str, ...]:
    """Names of the shipped clusters, sorted."""
    return _names(_cluster_folder())


def looks_like_path(text: str) -> bool:
    """Whether the user means a file or folder rather than a shipped name."""
    return "/" in text or text.startswith(("~", ".")) or text.endswith(_SUFFIXES)


def find_model(name: str) -> ModelSpec:
    """A preset, a model YAML, a config.json, or a folder that holds one. Raises InputError."""
    if name in list_models():
        return load_document(_model_folder() / f"{name}.yaml", ModelSpec)
    path = _existing(name, "model", list_models())
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"{path.parent} holds no config.json; name a file, or add one")
    if path.suffix == ".json":
        return load_hf_config(path)
    return load_document(path, ModelSpec)


def find_cluster(name: str) -> Cluster:
    """A shipped cluster or a cluster YAML. Raises InputError."""
    if name in list_clusters():
        return load_document(_cluster_folder() / f"{name}.yaml", Cluster)
    return load_document(_existing(name, "cluster", list_clusters()), Cluster)


def _existing(name: str, noun: str, known: tuple[str, ...]) -> Path:
    path = Path(name).expanduser()
    if path.exists() and name:
        return path
    if looks_like_path(name):
        raise InputError(f"{noun} {name!r}: no such file; check the path (seen from {Path.cwd()})")
    # Presets differ in a few characters, so the cutoff is lower than for keys.
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    raise InputError(
        f"no {noun} is called {name!r}{hint} (shipped: {', '.join(known)}; or give a path)"
    )
