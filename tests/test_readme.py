"""The pages' file tree, options and links are true."""

import re
from pathlib import Path

import pytest

from bigplan.capabilities.native import NATIVE_TRAINING

ROOT = Path(__file__).parent.parent


def listed() -> set[str]:
    """Paths in the tree; indentation is nesting."""
    tree = (ROOT / "docs" / "files.md").read_text().split("```")[1]
    folders: list[str] = []
    paths = set()
    for line in tree.splitlines():
        if line.strip():
            depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
            folders[depth:] = [name]
            paths.add("".join(folders))
    return paths


def test_options_that_no_run_takes_are_said_to_be_for_plans() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    told = "".join(part for part in text.split(". ") if "Planned only" in part)
    for key in NATIVE_TRAINING:
        flag = f"--{key.replace('_', '-')}"
        assert flag in told
        assert text.count(flag) == told.count(flag)


def test_everything_listed_exists() -> None:
    assert not {path for path in listed() if not (ROOT / path).exists()}


def test_every_module_and_launch_file_is_listed() -> None:
    modules = {path for path in (ROOT / "bigplan").rglob("*.py") if path.name != "__init__.py"}
    launch = {path for path in (ROOT / "launch").rglob("*") if path.is_file()}
    missing = {str(path.relative_to(ROOT)) for path in modules | launch} - listed()
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md", "docs/*.md"])
def test_links_lead_somewhere(page: str) -> None:
    for path in sorted(ROOT.glob(page)):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links {target}"
