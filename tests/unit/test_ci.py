"""The hosted workflow and the hooks of pre-commit only call targets of `make` and jobs of `.ci/run`."""

import itertools
import re
import shlex
import subprocess

import pytest
import yaml
from selection import ROOT

CI = (ROOT / ".ci/run").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def steps() -> list[str]:
    """Return the commands of the workflow, one for each value of the matrix."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    found = []
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*matrix.values()):
            for command in (step["run"] for step in job["steps"] if "run" in step):
                for name, value in zip(matrix, values, strict=True):
                    command = command.replace(f"${{{{ matrix.{name} }}}}", str(value))
                found.append(command)
    return found


def hooks() -> list[str]:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    return [hook["entry"] for repository in settings["repos"] for hook in repository["hooks"]]


def test_every_command_exists() -> None:
    jobs = re.search(r"^jobs=\$\{\*:-(.+)\}$", CI, flags=re.MULTILINE)
    assert jobs is not None
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    called = set()
    for command in (*steps(), *hooks()):
        program, *words = shlex.split(command)
        if program == ".ci/run":
            called |= set(words)
        else:
            assert program == "make", command
            assert {word for word in words if "=" not in word} <= targets, command
    assert called == set(jobs[1].split()), "each job of .ci/run is a job of the workflow"


def test_ci_calls_targets_that_exist() -> None:
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True, timeout=60)
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    called = re.findall(r"^ +make (?:--\S+ (?:\d )?)*([a-z -]+)$", CI, flags=re.MULTILINE)
    called += re.findall(r"\btests venv\S* ([a-z-]+)", CI)
    names = {name for names in called for name in names.split()}
    assert {"check", "docs", "test-changed", "test-vllm", "test-engines"} <= names <= targets


@pytest.mark.parametrize("name", ["VLLM_TESTS", "ENGINE_TESTS"])
def test_ci_asks_for_the_files_that_make_runs(name: str) -> None:
    made = re.search(rf"^{name} := (.+)$", MAKEFILE, flags=re.MULTILINE)
    asked = re.search(rf'^{name.lower()}="(.+)"$', CI, flags=re.MULTILINE)
    assert made is not None and asked is not None
    assert made[1] == asked[1]
    assert all((ROOT / file).exists() for file in made[1].split())


@pytest.mark.parametrize("name", ["venv-vllm", "venv-engines"])
def test_environments_of_their_own_have_the_same_packages(name: str) -> None:
    made = re.search(rf"^\t\.{name}/bin/python -m pip install (.+)$", MAKEFILE, flags=re.MULTILINE)
    asked = re.search(rf"^ +environment {name} (.+)$", CI, flags=re.MULTILINE)
    assert made is not None and asked is not None
    extras, *packages = shlex.split(asked[1])
    words = shlex.split(made[1])
    here = words[words.index("--editable") + 1 :]
    assert here == [f".[{extras}]", "./pretrained", *packages]
    assert "openworldmodel_worlds" in CI[CI.index("environment() {") : CI.index("tests() {")]
