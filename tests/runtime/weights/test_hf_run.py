"""A run that starts from a Hugging Face folder and ends as one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file

from bigplan.errors import InputError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.runtime.checkpoint import latest
from bigplan.runtime.data import BatchSource, bundled_text
from bigplan.runtime.export.hf import export_checkpoint
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.carried import INPUTS
from bigplan.spec.hf.config import load_hf_config
from bigplan.spec.layers import BLOCKS
from bigplan.spec.model import ModelSpec
from tests.runtime.checkpoints import running
from tests.runtime.harness import check, context_of, execute, started
from tests.runtime.plans import CHUNK, plan_of, tiny_training
from tests.runtime.weights.hf_models import BIAS, LENGTH, Layers, logits, reference
from tests.toys import kind_placement

TOLERANCE = 1e-5  # fp32 sums of a few hundred terms in another order


def _folder(case: str, folder: Path) -> torch.nn.Module:
    theirs: Any = reference(case)
    theirs.save_pretrained(folder)
    assert isinstance(theirs, torch.nn.Module)
    return theirs


def _plan(folder: Path, model: ModelSpec, precision: str = "fp32") -> Plan:
    """Everything that can leaves the GPU; two micro-batches of two sequences."""
    tied = model.tied_embeddings
    away = kind_placement(1, Tier.HOST, Tier.HOST, (Recompute.NONE, Tier.HOST), Tier.HOST)
    layers = model.layer_sequence()
    blocks = {
        kind: kind_placement(
            layers.count(kind), Tier.NVME, Tier.NVME, (Recompute.NONE, Tier.NVME), Tier.NVME
        )
        for kind in BLOCKS
        if kind in layers
    }
    table = kind_placement(1, optimizer=Tier.HOST) if tied else away
    training = tiny_training(4, weights=str(folder), precision=precision)
    if model.block_inputs is not None:
        blocks[INPUTS] = away
    stage = StagePlacement(kinds={"embedding": table, **blocks, "head": away})
    placement = Placement(stages=(stage,), slots=2, chunk=CHUNK)
    strategy = Strategy(dp=1, micro_batch=2, accumulation_group=2)
    return plan_of(model, training, strategy, placement)


def _layers(worker: NativeWorker) -> Layers:
    context = context_of(worker)
    return [
        {name: view.clone() for name, view in context.views(flat, layer).items()}
        for layer, flat in worker.weights()
    ]


CASES = [
    *("llama", "mistral-window", "phi3-window", "qwen3", "mixtral", "qwen3-moe", "gpt2"),
    *(
        "opt-untied-no-bias",
        "olmo2",
        "cohere",
        "glm",
        "qwen2-moe-dense",
        "glm4-moe",
        "falcon-h1",
        "gemma4-e",
        "nemotron-h-latent",
        "nemotron-h-both",
        "qwen3-moe-turns",
        "sarvam-moe",
        "lara-mini",
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_a_run_starts_where_the_folder_is_and_exports_what_it_learned(
    case: str, tmp_path: Path
) -> None:
    theirs: Any = _folder(case, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    model = load_hf_config(tmp_path / "in" / "config.json")
    plan = _plan(tmp_path / "in", model)
    with started(plan) as worker:
        loss = worker.step().loss
        worker.step()
        learned = _layers(worker)
        worker.save(tmp_path / "checkpoints")
    assert loss == pytest.approx(_loss_of(theirs, plan), rel=TOLERANCE)
    export_checkpoint(latest(tmp_path / "checkpoints"), tmp_path / "out", "fp32")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for key in ("eos_token_id", "sliding_window"):
        assert getattr(loaded.config, key, None) == getattr(theirs.config, key, None)
    tokens = torch.randint(2, model.vocab, (2, LENGTH))
    with torch.no_grad():
        scores = loaded(tokens).logits
        ours, before, most = (
            logits(model, learned, tokens),
            theirs(tokens).logits,
            scores.abs().max(),
        )
    assert (ours - scores).abs().max() < TOLERANCE * most
    biases = {n: b for n, b in theirs.named_buffers() if n.endswith(BIAS)}
    for name, bias in biases.items():  # which no step changes
        assert torch.equal(dict(loaded.named_buffers())[name], bias)
    assert (before - scores).abs().max() > 100 * TOLERANCE * most


def test_a_routers_bias_keeps_its_bits_in_a_run_in_16(tmp_path: Path) -> None:
    """In one number of bf16 it would lose two thirds of them."""
    theirs: Any = _folder("glm4-moe-groups", tmp_path / "in")
    plan = _plan(tmp_path / "in", load_hf_config(tmp_path / "in" / "config.json"), "bf16")
    with started(plan) as worker:
        worker.step()
        worker.step()
        worker.save(tmp_path / "checkpoints")
    export_checkpoint(latest(tmp_path / "checkpoints"), tmp_path / "out", "bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    biases = {n: b for n, b in theirs.named_buffers() if n.endswith(BIAS)}
    assert len(biases) == 2
    for name, bias in biases.items():
        assert torch.equal(found[name], bias)
        assert not torch.equal(bias.bfloat16().float(), bias)


def _loss_of(theirs: Any, plan: Plan) -> float:
    """Mean over the first step's micro-batches."""
    source = BatchSource(bundled_text(), plan.training.sequence_length, 2, 0, 1, 0, 4)
    losses = []
    for number in range(2):
        batch = source.batch(0, number)
        with torch.no_grad():
            scores = theirs(batch.tokens).logits.flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(scores, batch.targets.flatten()))
    return float(torch.stack(losses).mean())


def test_a_run_from_a_folder_is_the_plain_loop(tmp_path: Path) -> None:
    _folder("gpt2", tmp_path / "in")
    plan = _plan(tmp_path / "in", load_hf_config(tmp_path / "in" / "config.json"))
    check(plan, execute(plan))


def test_weights_of_another_model_stop_the_start(tmp_path: Path) -> None:
    _folder("gpt2", tmp_path / "in")
    _folder("llama", tmp_path / "other")
    model = load_hf_config(tmp_path / "other" / "config.json")
    plan = _plan(tmp_path / "in", model)
    with pytest.raises(InputError, match="these weights are not those of"), started(plan):
        pass


def test_a_run_goes_on_without_the_folder_it_started_from(tmp_path: Path) -> None:
    _folder("llama", tmp_path / "in")
    plan = _plan(tmp_path / "in", load_hf_config(tmp_path / "in" / "config.json"))
    with started(plan) as worker:
        worker.step()
        worker.save(tmp_path / "checkpoints")
        loss = worker.step().loss
    shutil.rmtree(tmp_path / "in")
    with running(plan, tmp_path / "checkpoints") as (worker, done):
        assert done == 1
        assert worker.step().loss == loss
    export_checkpoint(latest(tmp_path / "checkpoints"), tmp_path / "out", "bf16")


def test_an_export_reaches_as_far_as_the_run_did(tmp_path: Path) -> None:
    _folder("llama", tmp_path / "in")
    model = load_hf_config(tmp_path / "in" / "config.json")
    short = model.model_copy(update={"max_sequence_length": LENGTH // 2})
    plan = _plan(tmp_path / "in", short)
    own = plan.training.model_copy(update={"weights": None})
    with started(plan_of(short, own, plan.strategy, plan.placement)) as worker:
        worker.step()
        worker.save(tmp_path / "checkpoints")
    export_checkpoint(latest(tmp_path / "checkpoints"), tmp_path / "out", "fp32")
    exported = load_hf_config(tmp_path / "out" / "config.json")
    assert exported.max_sequence_length == own.sequence_length > short.max_sequence_length
