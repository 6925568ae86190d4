"""Tests marked gpu skip themselves without CUDA; only they make this import torch."""

import pytest
from hypothesis import settings

from tests.examples import USUAL

# Neighbours on a shared machine stretch single examples several times: no deadline per example.
# The profile of `make test` tries half of a test's own number, so that it ends within a quarter of
# an hour on two cores.
for name, number in (("quick", USUAL // 5), ("bigplan", USUAL // 2), ("thorough", 10 * USUAL)):
    settings.register_profile(name, deadline=None, max_examples=number)
settings.load_profile("bigplan")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or _cuda_available():
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _cuda_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
