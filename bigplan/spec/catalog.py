"""Finds what is shipped, and models and clusters in YAML or a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path

from bigplan.errors import InputError, quoted
from bigplan.paths import exists, is_dir, is_file
from bigplan.spec.cluster import Cluster, cluster_folder
from bigplan.spec.files import shipped
from bigplan.spec.files.document import load_document
from bigplan.spec.files.reading import user_path
from bigplan.spec.gpu import find_gpu, list_gpus
from bigplan.spec.hf.cache import cached_config, hub_folder, is_id
from bigplan.spec.hf.config import load_hf_config
from bigplan.spec.link import find_link, find_network, list_links, list_networks
from bigplan.spec.model import ModelSpec

__all__ = [
    "find_cluster",
    "find_gpu",
    "find_link",
    "find_model",
    "find_network",
    "list_clusters",
    "list_gpus",
    "list_links",
    "list_models",
    "list_networks",
    "looks_like_path",
    "names_path",
]

_SUFFIXES = (".yaml", ".yml", ".json")


def _model_folder() -> Path:
    return shipped.PACKAGE / "models"


def list_models() -> tuple[str, ...]:
    """Names of the shipped models, sorted."""
    return shipped.names(_model_folder())


def list_clusters() -> tuple[str, ...]:
    """Names of the shipped clusters, sorted."""
    return shipped.names(cluster_folder())


def looks_like_path(text: str) -> bool:
    """Whether the user means a file or folder rather than a shipped name."""
    return "/" in text or text.startswith(("~", ".")) or text.endswith(_SUFFIXES)


def names_path(text: str, folder: Path = Path()) -> bool:
    """Whether the user means a path, seen from `folder`, and not a Hugging Face id.

    An id looks like a path; it is one where the cache has it, and no file has that name.
    """
    if not looks_like_path(text):
        return False
    return cached_config(text) is None or exists(folder / user_path(text))


def find_model(name: str) -> ModelSpec:
    """A preset, a model YAML, a config.json, a folder that holds one, or a cached one's id.

    Raises InputError.
    """
    if name in list_models():
        return shipped.load(_model_folder(), name, ModelSpec)
    if not names_path(name) and (cached := cached_config(name)) is not None:
        return load_hf_config(cached).model_copy(update={"name": name})
    path = _existing(name, "model", list_models())
    if is_dir(path):
        path = _config_in(path)
    if path.suffix == ".json":
        return load_hf_config(path)
    return load_document(path, ModelSpec)


def _config_in(folder: Path) -> Path:
    """The folder's config.json; an adapter's is read too, to be refused by name."""
    for name in ("config.json", "adapter_config.json"):
        if is_file(folder / name):
            return folder / name
    raise InputError(f"{folder} holds no config.json; name a file, or add one")


def find_cluster(name: str) -> Cluster:
    """A shipped cluster or a cluster YAML. Raises InputError."""
    if name in list_clusters():
        return shipped.load(cluster_folder(), name, Cluster)
    return load_document(_existing(name, "cluster", list_clusters()), Cluster)


def _existing(name: str, noun: str, known: tuple[str, ...]) -> Path:
    path = user_path(name)
    if exists(path) and name:
        return path
    if looks_like_path(name):
        hint = f"check the path (seen from {Path.cwd()})"
        if noun == "model" and is_id(name) and path.suffix not in {".json", ".yaml", ".yml"}:
            hint += (
                f"; as a Hugging Face id it is not in the cache, {hub_folder()}, either: run "
                f"`hf download {name} config.json`"
            )
        raise InputError(f"{noun} {quoted(name)}: no such file; {hint}")
    raise shipped.unknown(noun, name, known, "or give a path")
