"""Models that ship with the package, or with that of further worlds, are found by name."""

import json
from pathlib import Path

import pytest

from worldmodel import config as configs
from worldmodel.config import TrainConfig, WorldModelConfig
from worldmodel.errors import ModelError
from worldmodel.models.loading import location

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    path.parent
    for parent in (ROOT / "worldmodel" / "pretrained", ROOT / "pretrained" / location.WORLDS_PACKAGE)
    for path in parent.glob("*/config.json")
)


def test_the_models_of_both_packages_are_found() -> None:
    assert {path.name for path in FOLDERS} - {"codec-games", "codec-shapes"} == set(location.shipped_models())
    assert set(location.WORLDS) == {path.name for path in FOLDERS if path.parent.parent.name == "pretrained"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_configs_of_a_shipped_model_and_of_its_training_are_valid(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert values["format"] == 1
    configs.build(WorldModelConfig, values["model"])
    if recipe := values.get("training", {}).get("config"):
        configs.build(TrainConfig, recipe)


def test_a_model_of_a_package_that_is_installed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / location.WORLDS_PACKAGE / "another"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "config.json").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert location.resolve("another") == folder


@pytest.mark.parametrize("name", location.WORLDS)
def test_a_known_model_that_is_not_installed_names_the_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(location, "_roots", lambda: [ROOT / "worldmodel" / "pretrained"])
    with pytest.raises(ModelError, match=r"\[worlds\].*pip install \./pretrained"):
        location.resolve(name)
    with pytest.raises(ModelError, match="shapes-tiny"):
        location.resolve("shapes-none")
