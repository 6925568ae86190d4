"""Hints where somebody uses another tool's word for a key."""

import pytest

from bigplan.errors import InputError
from bigplan.solve.pins import parse_pins
from bigplan.spec.architecture import Architecture
from bigplan.spec.experiment import Experiment
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.words import did_you_mean, meant
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.model import ModelSpec


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("num_hidden_layers n_layer num_layers", "layers"),
        ("hidden_size n_embd d_model", "hidden"),
        ("intermediate_size intermediate n_inner ffn_dim", "ffn"),
        ("num_attention_heads n_head num_heads", "heads"),
        ("num_key_value_heads num_kv_heads num_query_groups", "kv_heads"),
        ("vocab_size", "vocab"),
        ("max_position_embeddings n_positions", "max_sequence_length"),
        ("rms_norm_eps layer_norm_epsilon", "norm_epsilon"),
        ("hidden_act activation_function", "mlp"),
        ("tie_word_embeddings", "tied_embeddings"),
        ("partial_rotary_factor rotary_pct", "rotary_fraction"),
        ("shared_experts n_shared_experts num_shared_experts", "shared_ffn"),
        ("hiden", "hidden"),
    ],
)
def test_a_models_dimensions_in_other_words(words: str, key: str) -> None:
    for word in words.split():
        assert meant(word, Architecture.model_fields) == key, word


# Keys that say it of several products: queries', keys' and values' stand for them.
_ALL_BIASES = ("attention_bias", "use_bias", "enable_bias", "bias")


def test_keys_of_every_family_of_hugging_face_are_known() -> None:
    said = {
        (key, ours.partition(".")[0])
        for one in FAMILIES.values()
        for ours, keys in one.keys.items()
        for key in keys
        # The only MLP's width where there are no experts, and of most families all biases.
        if ours != "dense_ffn"
        and (key, ours) != ("intermediate_size", "shared_ffn")
        and not (ours in ("attention_output_bias", "mlp_bias") and key in _ALL_BIASES)
        # Most families' layer_types say where windows are.
        and (key, ours) != ("layer_types", "mixer_pattern")
        # Most files have dense blocks before others alone.
        and (ours != "expert_pattern" or meant(key, Architecture.model_fields) != "dense_blocks")
        # Families with attention say these of it.
        and not (ours.startswith("state_space.") and key in ("num_heads", "head_dim", "use_bias"))
    }
    found = {(key, meant(key, Architecture.model_fields)) for key, _ in said if "." not in key}
    assert found == {(key, ours) for key, ours in said if "." not in key}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("lr: 1", "training.optimizer.learning_rate"),
        ("seq_len: 1", "training.sequence_length"),
        ("training: {learning_rate: 1}", "optimizer.learning_rate"),
        ("training: {batch_size: 8}", "global_batch"),
        ("training: {optimizer: {lr: 1}}", "learning_rate"),
        ("num_nodes: 2", "nodes"),
        ("caps: {ram: 8 GiB}", "host"),
    ],
)
def test_a_key_is_found_where_it_belongs(text: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{hint}'") as caught:
        parse_document(f"model: a\ncluster: b\n{text}", Experiment, "e.yaml")
    assert str(caught.value).count("(allowed: ") == 1


@pytest.mark.parametrize(
    ("word", "key"), [("host.ram", "host.memory"), ("nvme.disks", "nvme.drives"), ("ram", "memory")]
)
def test_a_word_with_dots_keeps_what_is_before_it(word: str, key: str) -> None:
    known = ["gpu.memory", "host.cores", "host.memory", "nvme.drives", "memory"]
    assert meant(word, known if "." in word else known[-1:]) == key


@pytest.mark.parametrize(
    ("word", "decision"), [("tensor_parallel", "tp"), ("activation_checkpointing", "recompute")]
)
def test_decisions_in_other_words(word: str, decision: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{decision}'"):
        parse_pins({word: "1"})


def test_what_is_allowed_is_told_once() -> None:
    with pytest.raises(InputError) as caught:
        parse_document("hidden_size: 1\nvocab_size: 2", ModelSpec, "m.yaml")
    assert str(caught.value).count("(allowed: ") == 1


@pytest.mark.parametrize("word", ["mamba", "zzz", "x" * 200])
def test_far_words_are_no_hints(word: str) -> None:
    assert did_you_mean(word, ["llama", "gpt2", "y" * 200]) == ""
