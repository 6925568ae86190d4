"""Ray workers of tests that ask for them fork from one server, which a run of pytest has once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.warm import warm_server, warm_workers, without_dashboard


@pytest.fixture(scope="session")
def server() -> Iterator[Path]:
    with warm_server() as path:
        yield path


@pytest.fixture(scope="module")
def warm_whole(server: Path) -> Iterator[None]:
    """Ray with all of its own processes."""
    with warm_workers(server):
        yield


@pytest.fixture(scope="module")
def warm(warm_whole: None) -> Iterator[None]:
    """Ray without a dashboard and its agents."""
    with pytest.MonkeyPatch.context() as patch:
        without_dashboard(patch)
        yield
