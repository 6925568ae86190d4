"""Options become an experiment; what is not planned is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from bigplan.cli.given import experiment_of, plan_options_given, run_options_given
from bigplan.cli.option import OPTION
from bigplan.cli.options import ExperimentOptions, keys, lists, numbers
from bigplan.errors import InputError, RefusedError
from bigplan.spec.cluster import Cluster
from bigplan.spec.experiment import Experiment
from bigplan.spec.files.problems import models_in
from bigplan.spec.lora import Lora
from bigplan.spec.model import ModelSpec
from tests.cli.conftest import Run

_WHAT = ExperimentOptions(model="tiny-llama-test", cluster="dgx-h100")


def test_the_arithmetic_of_a_step() -> None:
    options = replace(
        _WHAT,
        precision="fp16",
        gradient_precision="fp16",
        reduce_precision="fp32",
        fp8_gemms=True,
        attention="materialised",
        dropout="0.1",
    )
    training = experiment_of(None, options).resolved_training()
    assert (training.precision, training.gradient_precision, training.reduce_precision) == (
        "fp16",
        "fp16",
        "fp32",
    )
    assert (training.fp8_gemms, training.attention, training.dropout) == (True, "materialised", 0.1)


def test_values_that_look_like_nothing_are_given_all_the_same() -> None:
    options = ExperimentOptions(dropout="0.0", fp8_gemms=False, steps="3")
    assert plan_options_given(options) == ["fp8_gemms", "dropout"]
    assert plan_options_given(ExperimentOptions(settings=[], steps="3")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(_WHAT, nodes="four"), "`nodes` is 'four', which must be a whole number"),
        (replace(_WHAT, seed="1.5"), "`training.seed` is 1.5, which must be a whole number"),
        (
            replace(_WHAT, learning_rate="fast"),
            "`training.optimizer.learning_rate` is 'fast', which must be",
        ),
        (
            replace(_WHAT, checkpoint_every="x"),
            "`launch.checkpoint_every` is 'x', which must be a whole",
        ),
        (replace(_WHAT, max_wear="20%"), "`max_wear` is '20%', which must be a number"),
    ],
)
def test_numbers_that_are_none_are_told_as_in_files(
    options: ExperimentOptions, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        experiment_of(None, options)


def test_how_a_plan_is_run_is_read_as_in_files() -> None:
    options = ExperimentOptions(steps="30", checkpoint_every="0", run_dir="007", wandb="1e3")
    given = {"steps": 30, "checkpoint_every": 0, "run_dir": "007", "wandb": "1e3"}
    assert run_options_given(options) == given


def test_the_size_of_a_step_wins_over_a_files_however_it_says_it(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    text = "model: tiny-llama-test\ncluster: dgx-h100\ntraining: {sequence_length: 64, %s}\n"
    path.write_text(text % "global_batch: 8", encoding="utf-8")
    found = experiment_of(path, ExperimentOptions(tokens_per_step="2048")).resolved_training()
    assert found.global_batch == 32
    path.write_text(text % "tokens_per_step: 2048", encoding="utf-8")
    found = experiment_of(path, ExperimentOptions(global_batch="8")).resolved_training()
    assert found.global_batch == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(_WHAT, expert_parallel=8, engine="nemo"), "set ep=8: expert parallelism is a"),
        (replace(_WHAT, settings=["ep=4"], engine="fsdp2"), "set ep=4: expert parallelism is a"),
    ],
)
def test_what_is_not_planned_is_refused(options: ExperimentOptions, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        experiment_of(None, options)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("micro_batch: banana", r"`set.micro_batch` cannot be used: .*=banana: write a number"),
        ("blok.parameters: host", r"`set.blok.parameters` cannot be used: .* no such layer kind"),
        ("mikro_batch: 3", r"`set.mikro_batch` cannot be used: .* did you mean 'micro_batch'\?"),
    ],
)
def test_a_files_decision_that_cannot_be_is_told_with_its_line(
    setting: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "e.yaml"
    text = f"model: tiny-llama-test\ncluster: dgx-h100\nset:\n  tp: 1\n  {setting}\n"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=rf"e\.yaml:5: {message}"):
        experiment_of(path, ExperimentOptions())


def test_options_win_over_a_files_decision_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    text = "model: tiny-llama-test\ncluster: dgx-h100\nset: {micro_batch: banana}\n"
    path.write_text(text, encoding="utf-8")
    options = ExperimentOptions(settings=["micro_batch=2"])
    assert experiment_of(path, options).set == {"micro_batch": 2}


def test_one_rank_of_them_is_no_parallelism() -> None:
    options = replace(_WHAT, context_parallel=1, settings=["tp=8"])
    assert experiment_of(None, options).set == {"tp": 8, "cp": 1}


def test_another_tools_name_of_context_parallelism_pins_it() -> None:
    options = replace(_WHAT, context_parallel=2)
    assert experiment_of(None, options).set == {"cp": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cluster", "t4-cloud"), "Tesla T4 states no peak for bf16; use precision fp16, fp32"),
        (("--cluster", "dgx-a100-80g", "--fp8-gemms"), "no peak for fp8; leave fp8_gemms off"),
        (("--cluster", "dgx-h100", "--engine", "native", "--dropout", "0.1"), "dropout 0.1"),
    ],
)
def test_a_plan_that_the_hardware_or_engine_cannot_run(
    bigplan: Run, options: tuple[str, ...], message: str
) -> None:
    code, _, err = bigplan("plan", "--model", "tiny-llama-test", *options)
    assert code == 2
    assert message in err


def test_the_optimizer_and_its_schedule() -> None:
    options = replace(
        _WHAT,
        optimizer="sgd",
        momentum="0.5",
        schedule="cosine",
        warmup_steps="10",
        final_fraction="0.1",
        loss_scale="1024.0",
        steps="300",
    )
    training = experiment_of(None, options).resolved_training()
    assert (training.optimizer.name, training.optimizer.momentum) == ("sgd", 0.5)
    assert (training.schedule.name, training.schedule.warmup_steps) == ("cosine", 10)
    assert (training.schedule.final_fraction, training.loss_scale.initial) == (0.1, 1024.0)
    assert training.steps == 300  # the decay ends with the run


# Written in a file alone: a file is where they have room.
FILE_ONLY = {
    "training.optimizer.groups",
    "training.loss_scale.growth_interval",
    "training.loss_scale.factor",
    "training.validation.data",
    "training.validation.every",
    "training.validation.batches",
}


def schema_keys(model: type[BaseModel], before: str = "") -> dict[str, Any]:
    """Dotted keys of an experiment with their types; those of a model or cluster are their own."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = [one for one in models_in(field.annotation) if one not in (ModelSpec, Cluster)]
        if inner and before + name not in ("training.optimizer.groups",):
            found |= schema_keys(inner[0], f"{before}{name}.")
        else:
            found[before + name] = field.annotation
    return found


def test_every_key_of_the_schema_has_its_option() -> None:
    known = set(schema_keys(Experiment))
    given = set(keys().values())
    assert given <= known
    assert known - given == FILE_ONLY | {"training.steps"}  # which --steps says as launch.steps


def test_options_take_what_the_schema_does() -> None:
    known = schema_keys(Experiment)
    hints, made = get_type_hints(ExperimentOptions), ExperimentOptions.__dataclass_fields__
    for name, key in keys().items():
        annotation, option = known[key], made[name].metadata[OPTION]
        many = annotation if get_origin(annotation) is not dict else None
        choices = [word for part in literals(many) for word in get_args(part)]
        if choices and name != "engine":  # some of which are planned alone, and told so
            assert option.metavar == "|".join(choices), name
        if bool in parts(annotation):
            assert bool in parts(hints[name]), name
    numeric = {n for n, key in keys().items() if {int, float} & parts(known[key])}
    assert numbers() == numeric


def test_a_list_has_commas_between_its_words() -> None:
    assert lists() == {"lora_targets"}
    options = replace(
        _WHAT,
        lora_rank="8",
        lora_targets="q_proj, v_proj",
        lora_rank_stabilised=True,
        lora_dropout="0.05",
    )
    lora = experiment_of(None, options).resolved_training().lora
    assert lora == Lora(rank=8, targets=("q_proj", "v_proj"), rank_stabilised=True, dropout=0.05)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("q_prj,v_proj", r"lora.targets has 'q_prj', .* did you mean 'q_proj'\?"),
        ("q_proj,", "lora.targets has '', but blocks of"),
        ("v_proj,v_proj", "lora.targets names a product twice"),
    ],
)
def test_its_words_are_told_as_in_a_file(targets: str, message: str) -> None:
    options = replace(_WHAT, lora_rank="8", lora_targets=targets)
    with pytest.raises(InputError, match=message):
        experiment_of(None, options).resolved_training()


def parts(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    inner = get_args(annotation)
    return {annotation}.union(*map(parts, inner)) if inner else {annotation}


def literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [annotation]
    return [found for inner in get_args(annotation) for found in literals(inner)]
