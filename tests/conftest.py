"""Tests marked gpu skip themselves without CUDA; only they make this import torch."""

import pytest
from hypothesis import settings

# Neighbours on a shared machine stretch single examples several times: no deadline per example.
settings.register_profile("bigplan", deadline=None)
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
