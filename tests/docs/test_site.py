"""The site builds, and a dead link ends the build."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parent.parent.parent


def built(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_site_builds(tmp_path: Path) -> None:
    done = built(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    for page in (tmp_path / "site").glob("*.html"):  # nothing is fetched from elsewhere
        assert not any(f'{kind}="http' in page.read_text() for kind in ("src", 'css" href'))


@pytest.mark.parametrize("link", ["nowhere.md", "#nowhere", "index.md#nowhere"])
def test_a_dead_link_ends_it(tmp_path: Path, link: str) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    config = (tmp_path / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(config.partition("nav:")[0])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n[elsewhere]({link})\n")
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert link.strip("#").partition("#")[0] in done.stderr
