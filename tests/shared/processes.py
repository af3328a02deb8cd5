"""Processes of torchrun that execute a test's file as a script."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import main

from worldmodel.train import distributed


def torchrun(script: str, num_processes: int, *arguments: object, max_restarts: int = 0) -> None:
    """Run a script in several processes of this machine, which can import what tests share."""
    options = ["--standalone", "--nproc-per-node", str(num_processes), "--max-restarts", str(max_restarts)]
    with pytest.MonkeyPatch.context() as patch:
        # In front, not instead: the tests may be of a checkout that is not the installed one.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        main([*options, __file__, script, *map(str, arguments)])


def results_of(script: str, num_processes: int, folder: Path) -> list[Any]:
    """Run a script that is given a folder; returns the `<rank>.json` of every process."""
    torchrun(script, num_processes, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    distributed.leave()
