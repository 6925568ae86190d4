from typing import Any

import pytest

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_model
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.families.parts import Part, always, counts, flags, joined, off, renamed
from bigplan.spec.hf.reader import ConfigReader


def _reader(config: dict[str, Any], **defaults: Any) -> ConfigReader:
    return ConfigReader({"model_type": "mine"} | config, defaults, "config.json")


def test_of_what_parts_say_the_last_counts() -> None:
    both = joined(counts(ffn="narrow", heads="heads"), counts(ffn="wide"), always(qk_norm=True))
    found = both.read(_reader({"narrow": 8, "wide": 32, "heads": 4}))
    assert found == {"ffn": 32, "heads": 4, "qk_norm": True}
    assert both.keys == {"ffn": ("wide",), "heads": ("heads",)}


def test_a_part_by_other_names_is_read_and_written_by_these() -> None:
    model = find_model("tiny-llama-test")
    part = renamed(counts(heads="theirs", layers="same"), {"theirs": "ours"})
    assert part.read(_reader({"ours": 4, "same": 2, "theirs": 9})) == {"heads": 4, "layers": 2}
    with pytest.raises(InputError, match=r"config\.json: `ours` is 'x', which must be a whole"):
        part.read(_reader({"ours": "x", "same": 2}))
    assert part.write(model) == {"ours": model.heads, "same": model.layers}
    assert part.keys == {"heads": ("ours",), "layers": ("same",)}


def test_older_names_count_where_todays_are_absent() -> None:
    names = {"new": "old"}
    assert _reader({"old": 1}).by_old_names(names).get("new") == 1
    assert _reader({"old": 1, "new": 2}).by_old_names(names).get("new") == 2
    with pytest.raises(InputError, match="missing key 'new'"):
        _reader({}).by_old_names(names).get("new")


def test_a_key_of_another_type_or_value_is_refused() -> None:
    with pytest.raises(InputError, match="`biased` is 'yes', which must be true or false"):
        flags(qkv_bias="biased").read(_reader({"biased": "yes"}))
    assert off("lean").read(_reader({}, lean=False)) == {}
    with pytest.raises(RefusedError, match=r"`lean` is True.*supported: false: it stands"):
        off("lean", "false: it stands").read(_reader({"lean": True}))


def test_a_family_like_another_has_its_own_name_defaults_and_keys() -> None:
    llama = FAMILIES["llama"]
    own = llama.like(
        "own",
        "OwnForCausalLM",
        {"vocab_size": 7},
        Part(keys={"vocab": ("words",)}),
        without=("mlp_bias",),
    )
    config = own.write(find_model("tiny-llama-test"))
    assert (config["model_type"], config["architectures"]) == ("own", ["OwnForCausalLM"])
    assert "mlp_bias" not in config
    assert own.defaults == {**llama.defaults, "vocab_size": 7}
    assert own.keys == {**llama.keys, "vocab": ("words",)}
    assert own.tensors is llama.tensors
