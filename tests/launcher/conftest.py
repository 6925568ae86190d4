"""Ray workers of tests that ask for them fork from one server, which a run of pytest has once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.warm import warm_server, warm_workers


@pytest.fixture(scope="session")
def server() -> Iterator[Path]:
    with warm_server() as path:
        yield path


@pytest.fixture(scope="module")
def warm(server: Path) -> Iterator[None]:
    with warm_workers(server):
        yield
