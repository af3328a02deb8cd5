"""`worldmodel list` names what other commands take."""

import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from worldmodel.cli import main
from worldmodel.cli.list import POLICIES
from worldmodel.models.loading.base_models import BASE_MODELS
from worldmodel.models.loading.location import resolve, shipped_models


def listed(capsys: pytest.CaptureFixture[str], *what: str) -> dict[str, list[dict[str, str]]]:
    assert main(["list", *what, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_part_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = {part: {row["name"]: row for row in rows} for part, rows in listed(capsys).items()}
    assert set(found["worlds"]) >= set(shipped_models())
    assert found["worlds"]["minigrid-doorkey"]["size"] == "48 x 48"
    assert all(found["worlds"][name]["about"] for name in shipped_models())
    assert set(found["base-models"]) == set(BASE_MODELS)
    names = {Path(each.name).stem for each in files("worldmodel.configs").iterdir() if "yaml" in each.name}
    assert set(found["configs"]) == names
    assert all(row["about"] for row in found["configs"].values())


def test_models_of_runs_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "runs" / "mine" / "model"
    model.mkdir(parents=True)
    shutil.copy(resolve("minigrid-doorkey") / "config.json", model)
    broken = tmp_path / "runs" / "broken" / "model"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    names = [row["name"] for row in listed(capsys, "worlds")["worlds"]]
    assert "runs/mine/model" in names
    assert "runs/broken/model" not in names


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("worldmodel.")])
def test_the_policies_exist(name: str) -> None:
    module, attribute = name.split(":")
    found = pytest.importorskip(module, reason="the game is not installed", exc_type=ModuleNotFoundError)
    assert hasattr(found, attribute)


def test_it_is_quick_because_it_imports_no_torch() -> None:
    code = "import sys; from worldmodel.cli import main; main(['list']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_name_that_is_nearly_right_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "shape-tiny"]) == 2
    assert "did you mean 'shapes-tiny'" in capsys.readouterr().err


WRONG = [
    "rollout missing.png action",
    "rollout --model nothing --text caption action",
    f"rollout {__file__} --actions missing.png",
    "describe missing.png",
    "demo nothing",
    "serve nothing",
    "eval nothing",
    "export nothing --web page",
    "export nothing out",
    "train nothing",
    "first-steps --model nothing",
    "eval shapes-tiny --data nothing",
    "info nothing",
    "verify nothing",
    "info --plan nothing",
    "new nothing --budget 5m --out new.yaml",
    "encode nothing --model shapes-tiny --out out",
    f"encode {__file__} --model nothing --out out",
    "data check nothing",
    "plan shapes-tiny --start missing.png --goal missing.png",
    "plan nothing --env CartPole-v1",
    "publish nothing out",
    "download nothing",
    "rank one two --world nothing --env CartPole-v1",
]


def test_missing_files_and_models_are_noticed_at_once() -> None:
    code = (
        "import sys; from worldmodel.cli import main; "
        f"print([main(command.split()) for command in {WRONG!r}], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[2] * len(WRONG)} False\n"
    errors = done.stderr.splitlines()
    assert len(errors) == len(WRONG)
    for command, error in zip(WRONG, errors, strict=True):
        assert ("missing.png" if "missing.png" in command else "nothing") in error


def test_what_is_no_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for wrong in (tmp_path / "nothing", run, run / "checkpoints"):
        assert main(["export", str(wrong), str(tmp_path / "out")]) == 2
    missing, is_run, other = capsys.readouterr().err.splitlines()
    assert "no folder" in missing
    assert f"{run}/checkpoints/best" in is_run
    assert "not a checkpoint" in other
