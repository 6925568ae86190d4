"""Blocks with inputs of their own, and blocks that read keys and values of an earlier one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.spec.carried import INPUTS, KeySharing, keepers
from bigplan.spec.catalog import find_model
from bigplan.spec.files.document import load_document
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.layers import first_block
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import full_name

E2B = find_model("gemma-4-e2b")


def changed(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(E2B.model_dump() | changes)


def test_the_last_blocks_are_kinds_of_their_own() -> None:
    kinds = E2B.block_kinds
    assert kinds[:15] == (*("block",) * 4, "global") * 3
    assert kinds[15:] == (*("sharing",) * 4, "sharing_global") * 4
    assert E2B.layer_sequence() == ("embedding", INPUTS, *kinds, "head")
    names = [{p.name for p in E2B.kinds()[kind]} for kind in ("block", "sharing")]
    own = {f"{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
    assert names[0] - names[1] == own
    assert names[1] < names[0]


def test_the_last_blocks_before_them_keep_their_keys() -> None:
    """One of each kind of attention: of 15 blocks, four local ones before each global one."""
    assert keepers(E2B) == {13, 14}
    assert keepers(changed(key_sharing=None)) == set()


def test_blocks_that_share_keys_may_have_wider_mlps() -> None:
    shapes = {p.name: p.shape for p in E2B.kinds()["sharing"]}
    assert shapes["up_proj.weight"] == (2 * E2B.ffn, E2B.hidden)
    assert E2B.seen_by("sharing").keys_given
    assert not E2B.seen_by("block").keys_given


def test_tables_of_all_blocks_are_one_layer_apart_from_the_words() -> None:
    """So that they may live elsewhere than the words that the head reads."""
    (table,) = E2B.kinds()[INPUTS]
    assert table.shape == (E2B.vocab, 35 * 256)
    assert all(p.count < table.count for p in E2B.kinds()["embedding"])
    assert all(p.name != table.name for p in E2B.kinds()["block"])


def test_blocks_are_counted_from_zero_in_names() -> None:
    layers = E2B.layer_sequence()
    assert first_block(layers) == 2
    assert full_name(layers, 2, "q_proj.weight") == "layers.0.q_proj.weight"
    assert full_name(layers, 1, "embed_inputs.weight") == "embed_inputs.weight"
    assert full_name(("embedding", "block", "head"), 1, "x") == "layers.0.x"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key_sharing": {"blocks": 31, "ffn": 8}}, "a local and a global block before these"),
        ({"mlp": "swiglu"}, "`block_inputs` with `mlp: swiglu`"),
        ({"block_inputs": None, "positions": "none"}, "`key_sharing` with `positions: none`"),
        ({"qk_norm_turned": True}, "`block_inputs` with `qk_norm_turned`"),
    ],
)
def test_what_does_not_go_together_is_said(changes: dict[str, object], said: str) -> None:
    if changes.get("positions") == "none":
        changes |= {"rope_scaling": None, "local_rope_theta": None}
    with pytest.raises(ValueError, match=re.escape(said)):
        changed(**changes)


def test_a_file_whose_blocks_all_share_keys_is_refused(tmp_path: Path) -> None:
    """As kinds of blocks see their model; nobody would make keys."""
    path = tmp_path / "model.yaml"
    all_of_it = KeySharing(blocks=E2B.layers, ffn=8)
    path.write_text(to_yaml(E2B.model_copy(update={"key_sharing": all_of_it})))
    with pytest.raises(InputError, match="none of `layers` 35 with keys for others; share fewer"):
        load_document(path, ModelSpec)
