from pathlib import Path
from typing import Any

import pytest
import yaml

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.experiment import Experiment, load_experiment, make_experiment
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.files.json_schema import json_schema

_FULL = """
model: llama-3-8b
cluster: dgx-h100
nodes: 2
training: {sequence_length: 4096, global_batch: 128, optimizer: {learning_rate: 1e-4}}
launch: {steps: 5}
set: {tp: 8, recompute: full, rho: 0.05}
caps: {gpu: 40 GiB}
engine: native
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "e.yaml"
    path.write_text(text)
    return path


def test_a_hugging_face_config_is_no_experiment(tmp_path: Path) -> None:
    path = write(tmp_path, '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    with pytest.raises(InputError, match="is a Hugging Face config") as caught:
        load_experiment(path)
    assert f"--model {path}" in str(caught.value)


def test_full_experiment(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, _FULL))
    assert experiment.set == {"tp": 8, "recompute": "full", "rho": 0.05}
    assert experiment.launch.run_dir == "runs"
    assert experiment.model_spec() == find_model("llama-3-8b")
    cluster = experiment.cluster_spec()
    assert (cluster.gpus, cluster.group.gpu.memory) == (16, 40 * 2**30)
    training = experiment.resolved_training()
    assert (training.global_batch, training.optimizer.learning_rate) == (128, 1e-4)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(to_yaml(find_cluster("h200-1x")))
    text = "{model: ./m.yaml, cluster: c.yaml, training: "
    text += "{data: a.txt, weights: hf, lora: {weights: ../peft}}}"
    experiment = load_experiment(write(tmp_path, text))
    assert experiment.model == str(tmp_path / "m.yaml")
    assert experiment.cluster_spec() == find_cluster("h200-1x")
    assert experiment.training.data == str(tmp_path / "a.txt")
    assert experiment.training.weights == str(tmp_path / "hf")
    assert experiment.training.lora is not None
    assert experiment.training.lora.weights == str(tmp_path / "../peft")


def test_inline_model_and_cluster(tmp_path: Path) -> None:
    cluster = yaml.safe_load(to_yaml(find_cluster("h200-1x")))
    model = {
        "name": "m",
        "layers": 1,
        "hidden": 8,
        "ffn": 8,
        "heads": 2,
        "vocab": 9,
        "max_sequence_length": 8,
        "source": "here",
    }
    text = yaml.safe_dump({"model": model, "cluster": cluster})
    experiment = load_experiment(write(tmp_path, text))
    assert experiment.model_spec().name == "m"
    assert experiment.cluster_spec() == find_cluster("h200-1x")


def test_overrides_win_and_keep_their_own_paths(tmp_path: Path) -> None:
    path = write(tmp_path, _FULL)
    overrides = {"training.global_batch": "512", "model": "./here.yaml", "nodes": 1}
    experiment = load_experiment(path, overrides)
    assert (experiment.training.global_batch, experiment.nodes) == (512, 1)
    assert experiment.training.sequence_length == 4096
    assert experiment.model == "./here.yaml"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("caps.gpu", "16 Gix"),
        ("caps.gpx", "16 GiB"),
        ("caps.gpu", "16"),
        ("training.sequence_length", 0),
        ("within", "30 d"),
    ],
)
def test_a_wrong_option_is_no_fault_of_a_line_of_the_file(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(InputError, match=r"\Acommand line: .*(gpx|within|gpu|length)"):
        load_experiment(write(tmp_path, _FULL), {key: value})


def test_without_a_file() -> None:
    experiment = make_experiment(
        {"model": "gpt2-xl", "cluster": "h200-1x", "caps.gpu": "16 GiB", "set.tp": "1"}
    )
    assert experiment == Experiment(
        model="gpt2-xl", cluster="h200-1x", caps={"gpu": 16 * 2**30}, set={"tp": 1}
    )


def test_the_cheapest_of_nodes_without_a_network_is_one() -> None:
    many = {"model": "gpt2-xl", "cluster": "h200-1x", "nodes": 16}
    cheapest = make_experiment({**many, "prefer": "cheapest"})
    assert cheapest.apart()
    assert cheapest.cluster_spec() == find_cluster("h200-1x")
    with pytest.raises(InputError, match="describes no network"):
        make_experiment(many).cluster_spec()
    connected = make_experiment({**many, "prefer": "cheapest", "cluster": "dgx-h100"})
    assert not connected.apart()
    assert connected.cluster_spec().nodes == 16


def test_caps_above_what_there_is() -> None:
    group = find_cluster("dgx-h100").group
    assert group.nvme is not None
    have = {"gpu": group.gpu.memory, "host": group.host.memory, "nvme": group.nvme.node_capacity}
    plain = {"model": "gpt2-xl", "cluster": "dgx-h100"}
    for more in (0, 1):
        caps = {f"caps.{tier}": size + more for tier, size in have.items()}
        experiment = make_experiment({**plain, **caps})
        assert experiment.idle_caps() == (have if more else {})
        assert experiment.cluster_spec() == find_cluster("dgx-h100")
    assert make_experiment(plain).idle_caps() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\ncluster: b\nnode: 2", "e.yaml:3: unknown key 'node'; did you mean 'nodes'?"),
        ("model: a", "e.yaml:1: missing key 'cluster'"),
        ("model: a\ncluster: b\nlaunch:\n  nodse: 1", "e.yaml:4: unknown key 'nodse' in `launch`"),
        ("model: {name: x}\ncluster: b", "e.yaml:1: missing key 'layers' in `model`"),
        (
            "model: a\ncluster: b\ncaps: {gpu: 16}",
            "`caps.gpu`: 16 B is too little for any tensor; write the unit, such as 16 GiB",
        ),
        ("model: a\ncluster: b\ncaps: {gpus: 1 GiB}", "e.yaml:3: unknown key 'gpus' in `caps`"),
        ("model: a\ncluster: b\nengine: alpa", "must be one of auto, any, native, deepspeed"),
        ("model: a\ncluster: b\nnodes: two", "`nodes` is 'two', which must be a whole number"),
        ("model: 3\ncluster: b", "`model` is 3, which must be text"),
        (
            "model: llama-3-8b\ncluster: dgx-h100\nset: {tp: [8]}",
            "3: `set.tp` is a list, which must be text (put it in quotes) or a whole number or a "
            "number",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(write(tmp_path, text))
    assert message in str(caught.value)


def test_json_schema_says_what_fields_mean() -> None:
    kinds = json_schema(Experiment)["$defs"]
    gpu, link = kinds["Gpu"]["properties"], kinds["GpuLink"]["properties"]
    assert "hides" in gpu["launch_overhead"]["description"]
    assert "where it comes from" in link["sources"]["description"]  # a field of its base


def test_json_schema_accepts_what_the_loader_accepts() -> None:
    schema = json_schema(Experiment)
    assert schema["properties"].keys() == Experiment.model_fields.keys()
    assert schema["additionalProperties"] is False
    jsonschema = pytest.importorskip("jsonschema")
    validator: Any = jsonschema.Draft202012Validator(schema)
    inline = yaml.safe_load(to_yaml(find_cluster("dgx-h100")))
    validator.validate(yaml.safe_load(_FULL.replace("1e-4", "0.0001")) | {"cluster": inline})
    assert not validator.is_valid({"model": "a", "cluster": "b", "nodse": 1})


@pytest.mark.parametrize("key", ["context_parallel", "ep"])
def test_unplanned_decisions_are_refused_by_name(tmp_path: Path, key: str) -> None:
    """Experts on several ranks are planned, but not for every engine."""
    text = f"{{model: llama-3-8b, cluster: dgx-h100, engine: fsdp2, set: {{{key}: 2}}}}"
    with pytest.raises(InputError, match=f"set {key}=2: .* parallelism is "):
        load_experiment(write(tmp_path, text))
    plain = make_experiment({"model": "llama-3-8b", "cluster": "dgx-h100", "engine": "fsdp2"})
    with pytest.raises(RefusedError, match="leave it out"):
        plain.with_settings({key: 2})
    assert plain.with_settings({key: 1, "tp": 2}).set == {key: 1, "tp": 2}


def test_the_validation_data_is_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(
        "model: tiny-llama-test\ncluster: h200-1x\n"
        "training: {data: a, validation: {data: b/held-out, every: 7}}\n"
    )
    training = load_experiment(path).resolved_training()
    assert training.validation is not None
    assert (training.validation.data, training.validation.every) == (
        str(tmp_path / "b" / "held-out"),
        7,
    )
    changed = load_experiment(path, {"training.validation.data": "c"}).resolved_training()
    assert changed.validation is not None
    assert changed.validation.data == "c"
    path.write_text(
        "model: tiny-llama-test\ncluster: h200-1x\ntraining:\n  validation: {data: b, every: 0}\n"
    )
    with pytest.raises(InputError, match=r"e\.yaml:4.*every"):
        load_experiment(path)


@pytest.mark.parametrize(
    ("key", "slip", "message"),
    [
        ("gpu.memory", 80, "gpu.memory` is 80 B, .* such as '80 GiB'"),
        ("host.memory_bandwidth", 62, "host.memory_bandwidth` is 62 B/s, .* such as '25 GB/s'"),
        ("gpu.peak_flops", {"bf16": 989}, "gpu.peak_flops.bf16` is 989 FLOP/s, .* TFLOP/s'"),
        ("host.adam_rate", 4, "host.adam_rate` is 4 /s, .* G/s'"),
        ("pcie.latency", 10, "pcie.latency` is 10 s, .* such as '7 us'"),
        ("intra_node.bandwidth", 0.45, "intra_node.bandwidth` is 0.45 B/s"),
    ],
)
def test_a_unit_left_out_is_told_from_a_small_machine(key: str, slip: Any, message: str) -> None:
    block, field = key.split(".")
    data = find_cluster("dgx-h100").model_dump(mode="json")
    plain = {"model": "llama-3-8b", "cluster": data}
    assert make_experiment(plain).cluster_spec().gpus == 8
    data["node_groups"][0][block][field] = slip
    with pytest.raises(InputError, match=f"cluster.node_groups.0.{message}"):
        make_experiment(plain)


def test_a_unit_left_out_names_file_and_line(tmp_path: Path) -> None:
    """Of the file that says it: the cluster's own, or the experiment's that writes it out."""
    good = to_yaml(find_cluster("rtx-4090-workstation"))
    text = good.replace("    memory: 23.5 GiB", "    memory: 24")
    line = 1 + text.splitlines().index("    memory: 24")
    (tmp_path / "mine.yaml").write_text(text)
    path = write(tmp_path, "model: llama-3-8b\ncluster: ./mine.yaml\n")
    told = rf"mine\.yaml:{line}: `node_groups\.0\.gpu\.memory` is 24 B, which no machine has"
    with pytest.raises(InputError, match=told):
        load_experiment(path).cluster_spec()
    inside = "".join(f"  {row}\n" for row in text.splitlines())
    path = write(tmp_path, f"model: llama-3-8b\ncluster:\n{inside}")
    told = rf"e\.yaml:{line + 2}: `cluster\.node_groups\.0\.gpu\.memory` is 24 B"
    with pytest.raises(InputError, match=told):
        load_experiment(path)


def test_a_context_as_large_as_its_gpu_is_told() -> None:
    data = find_cluster("dgx-h100").model_dump(mode="json")
    data["node_groups"][0]["gpu"]["context_memory"] = "80 GiB"
    told = r"gpu\.context_memory` is 80 GiB, which leaves nothing of the GPU's 79 GiB"
    with pytest.raises(InputError, match=told):
        make_experiment({"model": "llama-3-8b", "cluster": data})
