"""How unlike what a model knows a picture is: measured by training, kept in its folder, told to users."""

from pathlib import Path

import numpy as np
import pytest
import torch
from clip_tables import MODEL, write_table
from PIL import Image, ImageDraw

from worldmodel import cli, shapes
from worldmodel.config import DataConfig, SourceConfig, TrainConfig, ValidationConfig
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.media import write_video
from worldmodel.models.known import LEAST, KnownObservations
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.observation_score import check_score, known_observations
from worldmodel.train import validation
from worldmodel.worlds import start_images

FIRST_FRAME = Path(__file__).parents[2] / "demo" / "first_frame.png"


@pytest.fixture(scope="module")
def tiny() -> WorldModel:
    return WorldModel.from_pretrained("shapes-tiny")


def unlike_pictures() -> dict[str, np.ndarray]:
    """Pictures of other worlds, none of which the shapes world knows."""
    drawing = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(drawing).ellipse((10, 10, 40, 40), fill="red")
    door = WorldModel.from_pretrained("minigrid-doorkey").start_images[0].image
    slope = np.linspace(0, 255, 64).astype(np.uint8)
    return {
        "a drawing": np.array(drawing),
        "a board": np.array(Image.fromarray(door).resize((64, 64))),
        "noise": np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8),
        "a gradient": np.repeat(np.tile(slope, (64, 1))[..., None], 3, axis=2),
    }


def score(model: WorldModel, picture: np.ndarray) -> float | None:
    session = model.session()
    session.reset(picture)
    return session.observation_score()


def test_a_shipped_world_tells_its_own_pictures_from_others(tiny: WorldModel) -> None:
    rng = np.random.default_rng(7)
    own = [score(tiny, shapes.render(shapes.random_scene(rng))) or 0 for _ in range(40)]
    assert np.mean(np.array(own) <= 1) >= 0.95
    assert all((score(tiny, start.image) or 9) <= 1 for start in start_images(tiny))
    assert {name: score(tiny, picture) > 1.5 for name, picture in unlike_pictures().items()} == dict.fromkeys(
        unlike_pictures(), True
    )


@pytest.mark.parametrize("name", ["shapes-memory", "minigrid-doorkey"])
def test_every_world_knows_the_pictures_that_it_offers(name: str) -> None:
    model = WorldModel.from_pretrained(name)
    assert all((score(model, start.image) or 9) <= 1 for start in start_images(model))
    other = unlike_pictures()["a drawing"]
    height, width = start_images(model)[0].image.shape[:2]
    assert (score(model, np.array(Image.fromarray(other).resize((width, height)))) or 0) > 1.5


def test_a_folder_keeps_what_its_model_knows(model: WorldModel, image: np.ndarray, tmp_path: Path) -> None:
    assert score(model, image) is None  # its folder does not say
    rng = np.random.default_rng(0)
    frames = np.stack([image // 2 + rng.integers(0, 9, image.shape).astype(np.uint8) for _ in range(40)])
    model.known = known_observations(model, frames)
    assert model.known is not None
    try:
        expected = score(model, image)
        folder = model.save_pretrained(tmp_path / "saved", dtype=torch.float32)
    finally:
        model.known = None
    loaded = WorldModel.from_pretrained(folder)
    assert score(loaded, image) == pytest.approx(expected, rel=1e-5)
    assert score(loaded, frames[0]) == pytest.approx(min(score(loaded, frames[0]) or 9, 1.0))

    file = folder / "known.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:50])
    with pytest.raises(ModelError, match="damaged"):
        WorldModel.from_pretrained(folder)
    KnownObservations(1.0, 1.0, torch.zeros(3, 5)).write(file)
    with pytest.raises(ModelError, match="another model"):
        WorldModel.from_pretrained(folder)


def test_a_world_of_one_picture_knows_it(model: WorldModel, image: np.ndarray, tmp_path: Path) -> None:
    """Its held-out states are those that they are compared with: no distance, and a folder that loads."""
    model.known = known_observations(model, np.repeat(image[None], 40, axis=0))
    try:
        loaded = WorldModel.from_pretrained(model.save_pretrained(tmp_path / "saved", dtype=torch.float32))
    finally:
        model.known = None
    assert score(loaded, image) == pytest.approx(1, abs=0.01)  # its codec is not trained: the error decides
    assert (score(loaded, 255 - image) or 0) > 1
    still = KnownObservations.of(torch.zeros(40), torch.ones(40, 8))
    assert still is not None and still.error > 0 and still.distance > 0


def test_one_in_a_hundred_held_out_frames_is_above_the_limit() -> None:
    errors, states = (
        torch.linspace(1, 2, 200),
        torch.randn(200, 8, generator=torch.Generator().manual_seed(0)),
    )
    known = KnownObservations.of(errors, states)
    assert known is not None and known.error == pytest.approx(1.99)
    scores = known.score(errors, known.states[:1].expand(200, -1))
    assert int((scores > 1).sum()) == 2
    far = known.score(errors[:1], torch.full((1, 8), 30.0))
    assert far.item() > 10  # the codec returns it, and no state is near
    assert KnownObservations.of(errors[: LEAST - 1], states[: LEAST - 1]) is None


def test_frames_are_those_of_held_out_episodes(tmp_path: Path, model: WorldModel) -> None:
    rows = []
    for number, base in enumerate((0, 100)):
        film = np.stack([np.full((32, 32, 3), base + 4 * index, np.uint8) for index in range(25)])
        write_video(film, tmp_path / f"{number}.mp4", MODEL.fps, 1)
        rows.append({"video": f"{number}.mp4", "keys": [["left"]] * 3})
    columns = {"video": "video", "keys": "keys"}
    held = SourceConfig("clips", str(write_table(tmp_path, rows)), columns=columns, weight=0)
    config = TrainConfig(
        model=MODEL, data=DataConfig({"held": held}), validation=ValidationConfig("held"), seed=4
    )
    brightness = validation.known_frames(config, model).mean(axis=(1, 2, 3))
    assert len(brightness) == validation.NUM_KNOWN_FRAMES
    half = len(brightness) // 2
    assert brightness[:half].max() < 99 < brightness[half:].min()  # an episode's frames are together
    assert len(set(brightness.round())) == 6  # three rounds of two films
    without = TrainConfig(model=MODEL, data=DataConfig({"held": held}))
    assert not len(validation.known_frames(without, model))


def test_a_limit_refuses_and_without_one_there_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "unlike.png"
    Image.fromarray(unlike_pictures()["a drawing"]).save(path)
    assert cli.main(["describe", str(path)]) == 0
    assert "does not know that picture" in capsys.readouterr().err
    assert cli.main(["describe", str(path), "--max-observation-score", "2"]) == 2
    assert not capsys.readouterr().out
    assert cli.main(["describe", str(FIRST_FRAME), "--max-observation-score", "1"]) == 0
    assert not capsys.readouterr().err


def test_a_limit_must_be_above_zero_and_needs_a_score() -> None:
    check_score(3.0, None)
    check_score(3.0, 3.0)
    with pytest.raises(ConfigError):
        check_score(1.0, 0.0)
    with pytest.raises(InputError):
        check_score(3.0, 2.9)
    with pytest.raises(InputError):
        check_score(None, 2.0)
