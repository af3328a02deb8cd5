"""The scripts and notebooks of examples/ run as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"imagination.py"}
"""Run by the test of its tutorial."""
SCRIPTS = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / name for name in ELSEWHERE})
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHORT = {"fine_tune.py": ["2"]}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_runs(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(script), *SHORT.get(script.name, [])]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: openworldmodel[docs]")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: openworldmodel[docs]")
    book = nbformat.read(notebook, as_version=4)
    os.environ.setdefault("MPLBACKEND", "agg")
    # In an empty folder, as after the installation of the package alone.
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_there_are_examples() -> None:
    assert len(SCRIPTS) == 5
    assert len(NOTEBOOKS) == 2
