"""Images to start from: kept in the model folder, offered by the server, and taken by the environment."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from clip_tables import MODEL, write_table
from huggingface_hub.utils import filter_repo_objects
from PIL import Image

from worldmodel.config import DataConfig, SourceConfig, TrainConfig, ValidationConfig, WorldModelConfig
from worldmodel.env import WorldEnv
from worldmodel.episodes import StartImage
from worldmodel.errors import InputError, ModelError
from worldmodel.media import write_video
from worldmodel.models.loading.location import FETCHED
from worldmodel.models.world_model import WorldModel
from worldmodel.train import validation
from worldmodel.worlds import get_world, start_images


@pytest.fixture
def images() -> tuple[StartImage, ...]:
    rng = np.random.default_rng(0)
    titles = ("a locked door", "b/../c")
    return tuple(StartImage(title, rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)) for title in titles)


@pytest.fixture
def saved(model: WorldModel, images: tuple[StartImage, ...], tmp_path: Path) -> Path:
    model.start_images = images
    try:
        return model.save_pretrained(tmp_path / "saved")
    finally:
        model.start_images = ()


def test_a_model_folder_keeps_its_start_images(saved: Path, images: tuple[StartImage, ...]) -> None:
    loaded = WorldModel.from_pretrained(saved)
    assert [start.title for start in loaded.start_images] == ["a locked door", "bc"]
    for found, start in zip(loaded.start_images, images, strict=True):
        assert np.array_equal(found.image, start.image)
    again = WorldModel.from_pretrained(loaded.save_pretrained(saved))
    assert [start.title for start in again.start_images] == ["a locked door", "bc"]


def test_an_image_of_another_size_is_fitted_and_a_damaged_one_is_named(saved: Path) -> None:
    Image.new("RGB", (90, 64), "red").save(saved / "start_images" / "07 red.png")
    red = WorldModel.from_pretrained(saved).start_images[-1]
    assert (red.title, red.image.shape) == ("red", (32, 32, 3))
    (saved / "start_images" / "08.png").write_bytes(b"no image")
    with pytest.raises(ModelError, match="start_images"):
        WorldModel.from_pretrained(saved)


def test_without_its_own_a_model_has_those_of_its_world(model: WorldModel) -> None:
    def of(config: WorldModelConfig) -> list[str]:
        model.config, before = config, model.config
        try:
            return [start.title for start in start_images(model)]
        finally:
            model.config = before

    assert of(replace(model.config, world="shapes")) == [s.title for s in get_world("shapes").start_images()]
    assert of(replace(model.config, world=None)) == of(replace(model.config, world="nowhere")) == []


def test_an_environment_starts_from_one_of_them(
    model: WorldModel, saved: Path, images: tuple[StartImage, ...]
) -> None:
    env = WorldEnv(saved)
    seen = {env.reset(seed=seed)[0].tobytes() for seed in range(12)}
    assert seen == {start.image.tobytes() for start in images}
    with pytest.raises(InputError, match="no start"):
        WorldEnv(model).reset()


def test_a_download_has_the_start_images(saved: Path) -> None:
    names = [str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()]
    fetched = set(filter_repo_objects(names, allow_patterns=list(FETCHED)))
    assert {name for name in names if name not in fetched} == {"README.md"}


def test_training_offers_the_first_frames_of_held_out_episodes(tmp_path: Path) -> None:
    # Brighter from frame to frame; 1 + 3 * 8 frames are three rounds.
    rows = []
    for number, base in enumerate((0, 100)):
        film = np.stack([np.full((32, 32, 3), base + 4 * index, np.uint8) for index in range(25)])
        write_video(film, tmp_path / f"{number}.mp4", MODEL.fps, 1)
        rows.append({"video": f"{number}.mp4", "keys": [["left"]] * 3})
    held = SourceConfig(
        "clips", str(write_table(tmp_path, rows)), columns={"video": "video", "keys": "keys"}, weight=0
    )
    config = TrainConfig(
        model=MODEL, data=DataConfig({"held": held}), validation=ValidationConfig("held"), seed=4
    )
    brightness = [start.image.mean() for start in validation.start_images(config)]
    assert brightness == pytest.approx([0, 100], abs=2)
