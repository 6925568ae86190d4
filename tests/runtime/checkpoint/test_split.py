"""What ranks of any split hold, write and read: together one process's, each element once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

pytest.importorskip("torch")

import torch

from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from bigplan.runtime.checkpoint import latest, restore
from bigplan.runtime.export.hf import export_checkpoint, write_folder
from bigplan.runtime.weights.first_values import first_values
from bigplan.runtime.weights.homes import fill_first
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter
from tests.examples import examples
from tests.runtime.harness import same
from tests.runtime.parallel.sharded_ranks import LFM2, QWEN3_NEXT, anywhere
from tests.runtime.parallel.split_ranks import (
    every_rank,
    resident,
    split_pairs,
    spread_pairs,
    state_of_all,
    write,
)
from tests.runtime.plans import elements_of, tiny_model, tiny_training
from tests.runtime.reference import State

KINDS = 3  # of stored values: two moments, and weights or their master copies


def _begun(plan: Plan, folder: Path | None = None) -> State:
    """The first state of all ranks as one, and a checkpoint of it, each element written once."""
    with every_rank(plan) as ranks:
        for context in ranks:
            fill_first(context, first_values(plan.model, plan.training))
        if folder is not None:
            files = write(ranks, plan, folder).files
            stored = sum(tensor.rectangle.elements for file in files for tensor in file.tensors)
            assert stored == KINDS * elements_of(plan.model)
        return state_of_all(ranks)


@settings(max_examples=examples(12), phases=[Phase.generate])  # to shrink one takes minutes
@given(split_pairs())
def test_any_split_begins_as_one_process_and_reads_what_any_other_wrote(
    plans: tuple[Plan, Plan],
) -> None:
    _check_pair(*plans)


@settings(max_examples=examples(12), phases=[Phase.generate])
@given(spread_pairs())
def test_experts_on_any_ranks_are_read_by_any_others(plans: tuple[Plan, Plan]) -> None:
    _check_pair(*plans)


def test_a_rank_whose_part_only_fills_up_has_zeros_again() -> None:
    """Of five words on three tensor-parallel ranks the last has one, and its second half none."""
    model = tiny_model(layers=1, vocab=5, heads=24, kv_heads=24, head_dim=2, ffn=48)
    training = tiny_training(2, precision="fp32")
    layouts = (Strategy(dp=1), Strategy(dp=1, cp=2, tp=3, zero=3))
    _check_pair(*(resident(model, training, strategy) for strategy in layouts))


@pytest.mark.parametrize("parts", [LFM2, QWEN3_NEXT], ids=["lfm2", "qwen3-next"])
def test_virtual_stages_of_unlike_blocks_read_and_write_as_others(parts: dict[str, object]) -> None:
    model, training = tiny_model(layers=5, **parts), tiny_training(4)
    layouts = Strategy(dp=1, pp=2, vpp=2), Strategy(dp=2, zero=3), Strategy(dp=1, pp=2, tp=2)
    in_turns, sharded, split = (anywhere(model, training, one) for one in layouts)
    _check_pair(in_turns, sharded)
    _check_pair(split, in_turns)


def _check_pair(one: Plan, two: Plan) -> None:
    """Assert that one begins as a single rank, and the other reads the same out of its files."""
    with tempfile.TemporaryDirectory() as folder:
        begun = _begun(one, Path(folder))
        same("first state", _begun(resident(one.model, one.training, Strategy(dp=1))), begun)
        with every_rank(two) as ranks:
            for context in ranks:
                restore(context, latest(Path(folder)))
            same("state", begun, state_of_all(ranks))


# Words that fill up, few heads; queries, keys and values as one matrix, and a tied head; the same
# matrix head by head.
LLAMA = tiny_model(vocab=251)
GPT2 = tiny_model(
    vocab=251,
    kv_heads=4,
    norm="layernorm",
    mlp="gelu_tanh",
    positions="learned",
    tied_embeddings=True,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)
NEOX = GPT2.model_copy(
    update={
        "mlp": "gelu",
        "positions": "rope",
        "rotary_fraction": 0.25,
        "parallel_residual": True,
        "tied_embeddings": False,
    }
)


@pytest.mark.parametrize("model", [LLAMA, GPT2, NEOX], ids=["llama", "gpt2", "gpt_neox"])
def test_any_split_starts_from_a_hugging_face_folder_and_writes_its_files_again(
    model: ModelSpec, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(5)

    def values(layer: int, parameter: Parameter) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    write_folder(model, values, tmp_path / "in", torch.float32)
    training = tiny_training(2, weights=str(tmp_path / "in"))
    for strategy in (
        *(Strategy(dp=1), Strategy(dp=1, tp=4), Strategy(dp=2, tp=2, zero=3)),
        Strategy(dp=4, zero=3, zero_group=2),
    ):
        name = f"{strategy.dp}-{strategy.tp}"
        _begun(resident(model, training, strategy), tmp_path / name)
        export_checkpoint(latest(tmp_path / name), tmp_path / f"out-{name}", "fp32")
        for file in (tmp_path / "in").iterdir():
            again = tmp_path / f"out-{name}" / file.name
            assert file.read_bytes() == again.read_bytes(), f"{strategy}: {file.name}"
