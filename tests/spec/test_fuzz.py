"""Descriptions changed at random: each is read or refused in a few words, and none does harm."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from bigplan.errors import BigplanError, InputError
from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster, find_model, list_clusters, list_models
from bigplan.spec.experiment import Experiment
from bigplan.spec.files import shipped
from bigplan.spec.files.document import load_document
from bigplan.spec.hf.config import to_hf_config
from bigplan.spec.training import TrainingRequest, resolve

CASES = 100  # of each kind of file
LONGEST_LINE = (
    2000  # characters of one problem: a list of the keys that there may be is the longest
)

ODD: tuple[Any, ...] = (
    *(None, True, "", "x", "3", "\0", "x" * 3000, "1e400 GB", "~", "8 GiB" * 900),
    *(0, -1, 1, 10**18, -(10**18), 10**90, 10**400, 1.5, 1e-320, 1e300, float("nan"), float("inf")),
    *([], {}, [["x"]], {"a": {"b": 1}}, [1] * 500, {str(i): i for i in range(300)}),
)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `data` with each of its keys or indices."""
    keys = data.keys() if isinstance(data, dict) else range(len(data))
    for key in list(keys):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from _places(data[key])


def _change_data(data: Any, chance: random.Random) -> None:
    place, key = chance.choice(list(_places(data)))
    match chance.randrange(5):
        case 4 if isinstance(place[key], int | float) and place[key] < 10**300:
            place[key] *= chance.choice((10**-6, 0, 2, 3, 1000, 10**12))
        case 0 | 1 | 4:
            place[key] = deepcopy(chance.choice(ODD))
        case 2:
            del place[key]
        case 3 if isinstance(place, dict):
            place[chance.choice(("nodes", "x" * 300, "rope_scaling", "layer_types"))] = place[key]
        case 3:
            place.append(place[key])


def _nested(data: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice((3, 70, 200))):
        data = [data] if chance.random() < 0.5 else {"a": data}
    return data


def _change_text(text: str, chance: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    number = chance.randrange(len(lines))
    raw = bytearray(text.encode())
    match chance.randrange(5):
        case 0:
            return bytes(raw[: chance.randrange(len(raw))])
        case 1:
            lines.insert(number, chance.choice(lines))
        case 2:
            for _ in range(chance.randrange(1, 6)):
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            return bytes(raw)
        case 3:
            lines[number] = lines[number].rstrip("\n") + chance.choice(
                ("[" * 9000, "9" * 5000, "&a")
            )
        case 4:
            indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
            lines[number] = f"{indent}zz: &z [*z, *y]\n"
    return "".join(lines).encode()


def _mutated(data: Any, dump: Callable[[Any], str], chance: random.Random) -> bytes:
    data = json.loads(json.dumps(data))
    for _ in range(chance.choice((1, 1, 2, 5))):
        if not data:
            break
        _change_data(data, chance)
    if chance.random() < 0.05:
        data = {"name": _nested(data, chance)}
    text = dump(data)
    return _change_text(text, chance) if chance.random() < 0.4 else text.encode()


def _yaml(folder: Path, names: tuple[str, ...]) -> list[Any]:
    return [yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in names]


def _dump_yaml(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False)


def _dump_json(data: Any) -> str:
    return json.dumps(data, indent=1)


def _require_short(error: BigplanError) -> None:
    assert max(map(len, str(error).splitlines())) < LONGEST_LINE


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    """What `read` makes of the file, or None where it is refused as it should be."""
    try:
        return read(path)
    except InputError as error:
        told = str(error)
        assert str(path) in told, told
        _require_short(error)
        return None


def _files(
    folder: Path, suffix: str, seeds: list[Any], dump: Callable[[Any], str]
) -> Iterator[Path]:
    chance = random.Random(20)
    path = folder / f"changed{suffix}"
    for _ in range(CASES):
        path.write_bytes(_mutated(chance.choice(seeds), dump, chance))
        yield path


def _use(model: Any) -> None:
    """The cheap half of a plan: the training's defaults and the graph of every layer."""
    try:
        training = resolve(TrainingRequest(), model)
        graph = build_graph(model, training, Strategy(dp=1))
        assert graph.layers == model.layer_sequence()
    except BigplanError as error:
        _require_short(error)


def test_models(tmp_path: Path) -> None:
    seeds = _yaml(shipped.PACKAGE / "models", list_models())
    loaded = 0
    for path in _files(tmp_path, ".yaml", seeds, _dump_yaml):
        model = _read(path, lambda p: find_model(str(p)))
        if model is not None:
            loaded += 1
            _use(model)
    assert 0 < loaded < CASES


def test_hugging_face_configs(tmp_path: Path) -> None:
    seeds: list[Any] = []
    for name in list_models():
        try:
            seeds.append(to_hf_config(find_model(name)))
        except BigplanError:
            continue
    qwen = next(seed for seed in seeds if seed["model_type"] == "qwen2")
    seeds.append(qwen | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64})
    seeds.append(qwen | {"layer_types": ["sliding_attention"] * 3})
    seeds.append(qwen | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    loaded = 0
    for path in _files(tmp_path, ".json", seeds, _dump_json):
        model = _read(path, lambda p: find_model(str(p)))
        if model is not None:
            loaded += 1
            _use(model)
    assert 0 < loaded < CASES


def test_clusters(tmp_path: Path) -> None:
    seeds = _yaml(shipped.PACKAGE.parent / "cluster_configs", list_clusters())
    read = [
        _read(p, lambda p: find_cluster(str(p)))
        for p in _files(tmp_path, ".yaml", seeds, _dump_yaml)
    ]
    assert any(cluster is not None for cluster in read)


def test_experiments(tmp_path: Path) -> None:
    seed = {
        "model": "tiny-llama-test",
        "cluster": "dgx-h100",
        "nodes": 2,
        "training": {
            "sequence_length": 64,
            "global_batch": 64,
            "optimizer": {"name": "adamw", "learning_rate": 1e-4},
            "schedule": {"name": "cosine", "warmup_steps": 2},
            "validation": {"data": "bundled", "every": 2},
        },
        "launch": {"steps": 5, "run_dir": "runs"},
        "set": {"tp": 2},
        "caps": {"gpu": "16 GiB", "host": "100 GiB"},
    }
    loaded = 0
    for path in _files(tmp_path, ".yaml", [seed], _dump_yaml):
        experiment = _read(path, lambda p: load_document(p, Experiment))
        if experiment is None:
            continue
        loaded += 1
        try:
            assert experiment.cluster_spec().gpus > 0
            _use(experiment.model_spec())
            experiment.resolved_training()
        except BigplanError as error:
            _require_short(error)
    assert 0 < loaded < CASES
