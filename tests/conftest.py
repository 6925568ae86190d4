"""Tests marked gpu skip themselves without CUDA; only they make this import torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, settings

from tests.effort import first_plans_alone, gets_first_plans
from tests.examples import USUAL
from tests.rewriting import rewrite_all
from tests.slow import SLOW

# Workers of `make test` share the cores. Products as small as these wait for a second thread longer
# than they compute: beside others, blocks and transformers' took 48 s of a core by two, 8 by one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is imported and collected stays: looking for cycles in it took 2 of a worker's 22 s.
gc.disable()

# Neighbours on a shared machine stretch single examples several times: no deadline per example,
# nor for how long it may take to make the first ones.
# The profile of `make test` tries a fifth of a test's own number: tests/examples.py says why.
for name, most in (
    ("quick", USUAL // 10),
    ("bigplan", USUAL // 5),
    ("thorough", 10 * USUAL),
):
    settings.register_profile(
        name, deadline=None, max_examples=most, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("bigplan")

# A shell's background job ignores SIGINT, one under nohup SIGHUP, and so would the processes that
# tests interrupt.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A list of launches of the tests' own: on the user's are launches that train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def first_plans() -> Iterator[None]:
    """For single tests: tests/effort.py says what they get."""
    with first_plans_alone():
        yield


@pytest.fixture(scope="module", autouse=True)
def _first_plans_in_some_files(request: pytest.FixtureRequest) -> Iterator[None]:
    with first_plans_alone() if gets_first_plans(request.path) else nullcontext():
        yield


@pytest.hookimpl(optionalhook=True)  # of xdist's, which one process does without
def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores: tests of launches and of killed ranks wait for a tenth of their time.

    What `time make test` counts lets it look like more: it lacks Ray's processes, and ranks, which
    fork from a server.
    """
    return (os.cpu_count() or 1) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Before workers start: they would each do it for themselves."""
    if not sys.dont_write_bytecode:
        rewrite_all(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        _slow_files_first(items)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or _cuda_available():
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Let the collector of cycles pass over what is there by now, and look a hundredth as often.

    Beside torch, Ray and nine thousand collected tests it takes a third of a plan's time. What is
    garbage by now, 80,000 objects, stays: to look for it takes each worker 0.6 s of a core.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def _slow_files_first(items: list[pytest.Item]) -> None:
    """Workers take files in order: one that begins last must be short."""
    rank = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(SLOW)))


def _cuda_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
