"""Adapters of Hugging Face models: trained as transformers would, exported as peft has them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bigplan.content import ADAPTERS
from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.rectangle import all_of
from bigplan.runtime.checkpoint import latest
from bigplan.runtime.data import BatchSource, bundled_text
from bigplan.runtime.export.hf import written_whole
from bigplan.runtime.export.peft import export_adapters, export_merged
from bigplan.runtime.memory.adapter_rows import NAME, adapter_parameters
from bigplan.runtime.weights.first_values import random_values
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.hf.config import load_hf_config
from bigplan.spec.hf.peft import CONFIG, WEIGHTS
from bigplan.spec.layers import BLOCKS
from tests.runtime.harness import started
from tests.runtime.linear.lora_ranks import frozen
from tests.runtime.plans import plan_of, tiny_training
from tests.runtime.weights.hf_models import LENGTH, reference

CLOSE = 1e-5  # fp32 sums of a few hundred terms in another order
STEPS = 3


def lora_plan(folder: Path, case: str, **lora: object) -> tuple[Any, Plan]:
    """A model of transformers in a folder, and a plan that trains adapters of it."""
    theirs: Any = reference(case)
    theirs.save_pretrained(folder)
    model = load_hf_config(folder / "config.json")
    training = tiny_training(2, weights=str(folder), lora={"rank": 4, **lora})
    kinds = {
        kind: frozen(layers, Tier.HOST if kind in BLOCKS else Tier.GPU)
        for kind, layers in Counter(model.layer_sequence()).items()
    }
    placement = Placement(stages=(StagePlacement(kinds=kinds),), slots=2)
    return theirs, plan_of(model, training, Strategy(dp=1), placement)


class _Adapted(nn.Module):
    """A linear module, frozen, with an adapter beside it."""

    def __init__(self, module: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.module, self.scale = module, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x) + self.scale * (x @ self.a.T) @ self.b.T
        return y


def test_a_run_is_a_plain_loop_of_transformers(tmp_path: Path) -> None:
    theirs, plan = lora_plan(tmp_path / "in", "llama")
    training = plan.training
    assert training.lora is not None
    theirs.requires_grad_(False)
    values = {
        p.name: random_values(NAME, ADAPTERS, p, all_of(p), training.seed)
        for p in adapter_parameters(plan.model, training.lora, range(plan.model.layers + 2))
    }
    mine = {}
    for number, layer in enumerate(theirs.model.layers):
        for parent in (layer.self_attn, layer.mlp):
            for name, module in list(parent.named_children()):
                if isinstance(module, nn.Linear):
                    a, b = (values[f"layers.{number}.{name}.lora_{side}"] for side in "AB")
                    mine[number, name] = _Adapted(module, a, b, training.lora.scale)
                    setattr(parent, name, mine[number, name])
    parameters = [p for adapted in mine.values() for p in (adapted.a, adapted.b)]
    o = training.optimizer
    optimizer = torch.optim.AdamW(
        parameters, o.learning_rate, (o.beta1, o.beta2), o.epsilon, o.weight_decay
    )
    source = BatchSource(bundled_text(), training.sequence_length, 2, 0, 1, training.seed)
    with started(plan) as worker:
        for step in range(STEPS):
            batch = source.batch(step, 0)
            scores = theirs(batch.tokens).logits.flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, batch.targets.flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            assert worker.step().loss == pytest.approx(float(loss.detach()), rel=CLOSE)


def _trained(plan: Plan, folder: Path) -> None:
    with started(plan) as worker:
        for _ in range(STEPS):
            worker.step()
        worker.save(folder)


def _loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def _logits(model: Any) -> Tensor:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 250 + 2
    with torch.no_grad():
        found = model(tokens).logits
    assert isinstance(found, Tensor)
    return found


EXPERTS = [f"experts.{name}_proj" for name in ("gate", "up", "down")]


def _alike(model: Any, ours: Tensor, theirs: Tensor) -> bool:
    """Whether logits are; a router's tie, decided by rounding, may give a token other experts."""
    apart = (ours - theirs).abs().amax(-1) > CLOSE * theirs.abs().max()
    return int(apart.sum()) <= int("experts" in str(model).lower())


CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-stabilised": {
        "rank_stabilised": True,
        "targets": ["q_proj", "down_proj"],
        "dropout": 0.1,
    },
    "gpt2": {},  # three of its matrices are one module, and modules are [in, out]
    "gpt2-some": {"targets": ["q_proj", "v_proj", "o_proj"], "alpha": 3.0},
    "phi3": {"rank_stabilised": True},  # queries, keys and values are one module
    "gpt-neox": {},  # and head by head
    "glm4": {},  # rows of queries and keys are in another order
    "mixtral": {},  # of attention alone
    "glm4-moe": {"dropout": 0.1},  # its first block is dense, and others have shared experts
    "qwen3-moe-experts": {"targets": [*EXPERTS, "q_proj"]},
    "gpt-oss-experts": {"targets": EXPERTS},  # gate and up take turns in columns of one parameter
    "lfm2-moe": {},  # what a convolution reads is one module
    "lfm3": {},  # files call its gates otherwise
    "nemotron-h": {},  # and all blocks
    "sarvam-moe": {},  # and have three of its modules in one matrix
    # What leads to a latent of experts and back.
    "nemotron-h-latent": {"targets": ["latent_down_proj", "latent_up_proj", "shared.up_proj"]},
    "nemotron-h-latent-experts": {"targets": [*EXPERTS[1:], "latent_up_proj"]},  # without a gate
    "qwen3-next": {},  # what a delta rule reads is two, and a gate is part of a third
    "gemma4-experts-experts": {"targets": [*EXPERTS, "q_proj"]},  # behind norms of their own
    "granite-hybrid": {},  # what a state space reads is one module, and an MLP's halves are another
    "granite-hybrid-experts-experts": {"targets": [*EXPERTS, "space.x_proj", "shared.down_proj"]},
}


def _model(case: str) -> str:
    return case.removesuffix("-stabilised").removesuffix("-some").removesuffix("-experts")


OF_EXPERTS = ("experts.down_proj", "experts.gate_up_proj", "experts.up_proj")


def _add_of_experts(
    modules: dict[str, Any], module: str, config: dict[str, Any], pair: tuple[Tensor, Tensor]
) -> None:
    """Each expert's, of which peft has rows of A together, and columns of B in turns.

    The parameter that it wraps first is called base_layer in the name of the tensors.
    """
    down, *entering = config["target_parameters"]
    assert (down, *entering) in (OF_EXPERTS[:2], OF_EXPERTS[::2])
    name = entering[0] if module.endswith(".base_layer") else down
    rank = config["rank_pattern"].get(name, config["r"])
    alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
    parameter = getattr(modules[module.removesuffix(".base_layer")], name.removeprefix("experts."))
    a, b = pair
    a, b = a.view(len(parameter), rank, -1), b.view(-1, rank, len(parameter))
    delta = alpha / rank * torch.einsum("ore,eri->eoi", b, a)
    with torch.no_grad():
        parameter += delta if delta.shape == parameter.shape else delta.mT


@pytest.mark.parametrize("case", CASES)
def test_adapters_and_the_merged_model_give_the_same(case: str, tmp_path: Path) -> None:
    """Each module's formula as peft documents it, by its folder's names and keys alone."""
    theirs, plan = lora_plan(tmp_path / "in", _model(case), **CASES[case])
    _trained(plan, tmp_path / "run")
    found = latest(tmp_path / "run")
    export_adapters(found, tmp_path / "adapters", "fp32")
    export_merged(found, tmp_path / "merged", "fp32")
    before, merged = _logits(theirs.eval()), _logits(_loaded(tmp_path / "merged"))
    config = json.loads((tmp_path / "adapters" / CONFIG).read_text())
    assert (config["peft_type"], config["base_model_name_or_path"]) == (
        "LORA",
        str(tmp_path / "in"),
    )
    of_modules = "target_parameters" not in config  # of others peft takes no dropout
    assert config["lora_dropout"] == of_modules * CASES[case].get("dropout", 0.0)
    tensors = load_file(tmp_path / "adapters" / WEIGHTS)
    modules, adapted = dict(theirs.named_modules()), set()
    told = [*config["target_modules"], *config.get("target_parameters", ())]
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if ".experts" in module:
            pair = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            _add_of_experts(modules, module, config, pair)
            continue
        end = next(e for e in told if f".{module}".endswith(f".{e.removesuffix('.weight')}"))
        rank = config["rank_pattern"].get(end, config["r"])
        alpha = config["alpha_pattern"].get(end, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        assert len(a) == rank
        delta = scale * b @ a
        with torch.no_grad():
            modules[module].weight += delta.T if config["fan_in_fan_out"] else delta
        adapted.add(module)
    ends = tuple(f".{end.removesuffix('.weight')}" for end in told if end not in OF_EXPERTS)
    assert adapted == {name for name in modules if f".{name}".endswith(ends)}
    most = merged.abs().max()
    assert _alike(theirs, _logits(theirs), merged)
    assert (before - merged).abs().max() > 100 * CLOSE * most


# peft 0.21 refuses adapters of `out_proj` where a model_type has Mamba.
OF_PEFT = [case for case in CASES if case != "nemotron-h"]


@pytest.mark.parametrize("case", OF_PEFT)
def test_peft_loads_the_folder(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    _, plan = lora_plan(tmp_path / "in", _model(case), **CASES[case])
    _trained(plan, tmp_path / "run")
    found = latest(tmp_path / "run")
    export_adapters(found, tmp_path / "adapters", "fp32")
    export_merged(found, tmp_path / "merged", "fp32")
    ours = _logits(peft.PeftModel.from_pretrained(_loaded(tmp_path / "in"), tmp_path / "adapters"))
    merged_model = _loaded(tmp_path / "merged")
    merged = _logits(merged_model)
    assert _alike(merged_model, ours, merged)


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    _, plan = lora_plan(tmp_path / "in", "llama")
    _trained(plan, tmp_path / "run")
    (tmp_path / "adapters").mkdir()
    with pytest.raises(InputError, match="exists already"):
        export_adapters(latest(tmp_path / "run"), tmp_path / "adapters", "fp32")


def test_frozen_weights_may_move_and_not_become_others(tmp_path: Path) -> None:
    _, plan = lora_plan(tmp_path / "in", "llama")
    _trained(plan, tmp_path / "run")
    moved = _in_several_files(tmp_path / "in", tmp_path / "moved")
    training = plan.training.model_copy(update={"weights": str(moved)})
    with _gone_on(plan.model_copy(update={"training": training}), tmp_path / "run") as again:
        assert again.step().step == STEPS + 1
    other = load_file(tmp_path / "in" / "model.safetensors")
    other["model.norm.weight"] += 1
    save_file(other, tmp_path / "in" / "model.safetensors")
    with (
        pytest.raises(InputError, match="beside other weights"),
        _gone_on(plan, tmp_path / "run"),
    ):
        pass
    with pytest.raises(InputError, match="beside other weights"):
        export_merged(latest(tmp_path / "run"), tmp_path / "merged", "fp32")


def _in_several_files(folder: Path, into: Path) -> Path:
    _loaded(folder).save_pretrained(into, max_shard_size="20KB")
    assert len(list(into.glob("*.safetensors"))) > 1
    return into


@contextmanager
def _gone_on(plan: Plan, run: Path) -> Iterator[NativeWorker]:
    worker = NativeWorker(plan, 0, run / "scratch")
    try:
        worker.preflight()
        worker.start(Path(), resume=run)
        yield worker
    finally:
        worker.close()


def test_what_a_killed_export_left_goes_and_a_users_folder_stays(tmp_path: Path) -> None:
    folder, mine = tmp_path / "model", tmp_path / "model.partial"
    mine.mkdir()
    (mine / "notes").write_text("mine")
    with pytest.raises(KeyboardInterrupt), written_whole(folder, 1) as begun:
        raise KeyboardInterrupt
    begun.mkdir()  # as SIGKILL leaves it
    (begun / "half").touch()
    with written_whole(folder, 1) as written:
        (written / "whole").touch()
    assert {path.name for path in tmp_path.rglob("*")} == {"model", "whole", mine.name, "notes"}
