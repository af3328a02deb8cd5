"""Rectangular frames: rows and columns are not exchanged in any component."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worldmodel import config as configs
from worldmodel.actions import Action
from worldmodel.config import CodecConfig, StageConfig, TrainedConfig, VisionConfig, WorldModelConfig
from worldmodel.data.loader import Batch
from worldmodel.env import WorldEnv
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError
from worldmodel.media import read_image
from worldmodel.models.layers.spatial import LocalFeedForward, rope_table
from worldmodel.models.loading import model_folder
from worldmodel.models.vision.adapter import LatentVision, Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.trainer import freeze

HEIGHT, WIDTH = 32, 48
ROWS, COLUMNS = 4, 6
LEFT = "the red ball moves left"


@pytest.fixture(scope="module")
def wide(make_model: Callable[..., WorldModel]) -> WorldModel:
    return make_model(image_size=(HEIGHT, WIDTH))


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    """An image without any symmetry."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (ROWS, COLUMNS, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)


# Settings


@pytest.mark.parametrize("given", [[480, 832], (480, 832)])
def test_image_size_is_height_and_width(given: Any) -> None:
    codec = CodecConfig(image_size=given)
    assert codec.image_size == (480, 832)
    assert (codec.grid, codec.cells) == ((60, 104), 6240)
    assert configs.build(CodecConfig, json.loads(json.dumps(configs.to_dict(codec)))) == codec


def test_square_image_size_is_one_number() -> None:
    square = CodecConfig(image_size=240)
    assert square == CodecConfig(image_size=[240, 240])
    assert (square.image_size, square.grid) == (240, (30, 30))
    assert configs.to_dict(square)["image_size"] == 240


def test_image_size_on_the_command_line() -> None:
    sizes = {"[480,832]": (480, 832), "240": 240, "[64, 64]": 64}
    for text, size in sizes.items():
        loaded = configs.load("pan", [f"model.codec.image_size={text}"])
        assert loaded.model.codec.image_size == size


@pytest.mark.parametrize(
    "size", [[480], [480, 832, 3], [480, 833], [8, 64], 30, 0, -64, 64.0, "64", None, True]
)
def test_invalid_image_size(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"codec\.image_size"):
        CodecConfig(image_size=size)


def test_merge_must_divide_both_sides() -> None:
    codec = CodecConfig(image_size=[32, 48])
    WorldModelConfig(codec=codec, vision=VisionConfig(merge=2))
    with pytest.raises(ConfigError, match=r"\b4\b.*\b6\b"):
        WorldModelConfig(codec=codec, vision=VisionConfig(merge=4))


def test_saved_config_of_a_square_model_is_unchanged() -> None:
    folder = model_folder.resolve("shapes-tiny")
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model"]
    assert (
        configs.to_dict(model_folder.read_config(folder))["codec"]["image_size"]
        == saved["codec"]["image_size"]
        == 64
    )


# Images


@given(
    st.integers(8, 40),
    st.integers(8, 40),
    st.integers(1, 3),
    st.integers(0, 30),
    st.booleans(),
    st.integers(0),
)
def test_images_are_centre_cropped_to_the_aspect_ratio(
    height: int, width: int, scale: int, margin: int, beside: bool, seed: int
) -> None:
    small = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    large = small.repeat(scale, 0).repeat(scale, 1)
    edges = ((0, 0), (margin, margin), (0, 0)) if beside else ((margin, margin), (0, 0), (0, 0))
    assert np.array_equal(read_image(np.pad(large, edges), (height, width)), small)


# Places


def test_rotary_positions_are_rows_and_columns() -> None:
    """Reference: the angles of every cell, computed separately."""
    frames, head = torch.tensor([0, 3]), 16
    table = rope_table(frames, (ROWS, COLUMNS), head).view(2, 2, ROWS, COLUMNS, head)
    for frame, row, column in ((0, 3, 5), (1, 0, 4), (1, 2, 1)):
        alone = [
            place * 100.0 ** (-index / size)
            for place, size in ((int(frames[frame]), 4), (row, 6), (column, 6))
            for index in range(0, size, 2)
        ]
        angles = torch.tensor(alone).repeat(2)
        torch.testing.assert_close(table[:, frame, row, column], torch.stack([angles.cos(), angles.sin()]))


def touched(change: Tensor) -> set[tuple[int, int]]:
    """Cells `[h w d]` at which there is a difference."""
    return {(int(row), int(column)) for row, column in (change.abs().amax(dim=-1) > 0).nonzero()}


def near(row: int, column: int, reach: int) -> set[tuple[int, int]]:
    return {
        (y, x) for y in range(ROWS) for x in range(COLUMNS) if max(abs(y - row), abs(x - column)) <= reach
    }


def test_local_mixing_uses_neighbouring_cells() -> None:
    torch.manual_seed(0)
    mix = LocalFeedForward(8)
    x = torch.randn(1, 2 * ROWS * COLUMNS, 8)
    moved = x.view(1, 2, ROWS, COLUMNS, 8).clone()
    moved[0, 1, 1, 4] += 1
    change = (mix(moved.view_as(x), (ROWS, COLUMNS)) - mix(x, (ROWS, COLUMNS))).view(2, ROWS, COLUMNS, 8)
    assert touched(change[0]) == set()
    assert touched(change[1]) == near(1, 4, 1)


def test_vision_features_are_aligned_with_cells() -> None:
    torch.manual_seed(0)
    vision = LatentVision(VisionConfig(width=16, num_blocks=0, merge=2), 4, (ROWS, COLUMNS), 8)
    latents = torch.randn(1, 1, 4, ROWS, COLUMNS)
    moved = latents.clone()
    moved[..., 3, 4] += 1
    before, after = vision(Observation(latents)), vision(Observation(moved))
    assert before.cells is not None and after.cells is not None
    assert vision.round_tokens == before.tokens.shape[1] == 2 * 3
    assert touched((after.cells - before.cells).view(ROWS, COLUMNS, 8)) == near(3, 4, 1)
    assert touched((after.tokens - before.tokens).view(2, 3, 8)) == {(1, 1), (1, 2)}


def test_merged_queries_are_aligned_with_their_cells(make_model: Callable[..., WorldModel]) -> None:
    vision = LatentVision(VisionConfig(width=16, num_blocks=0), 4, (ROWS, COLUMNS), 8, query_merge=2)
    latents = torch.randn(1, 2, 4, ROWS, COLUMNS)
    moved = latents.clone()
    moved[:, 1, :, 3, 4] += 1
    before, after = vision(Observation(latents)).queries, vision(Observation(moved)).queries
    assert before is not None and after is not None
    assert touched((after - before).view(2, 3, 8)) == {(1, 1), (1, 2)}

    model = make_model(image_size=(HEIGHT, WIDTH), query_merge=2)
    head = model.state
    assert head is not None
    head.layers = torch.nn.ModuleList()  # those mix the cells
    context, hidden = latents[:, 1:], torch.randn(1, 6, model.backbone.width)
    other = hidden.clone()
    other[0, 5] += 1  # the last query: rows 2 and 3, columns 4 and 5
    changed = head(other, context).forecast - head(hidden, context).forecast
    assert touched(changed[0, 0].permute(1, 2, 0)) == {(2, 4), (2, 5), (3, 4), (3, 5)}
    assert len({tuple(changed[0, 0, :, row, column].tolist()) for row in (2, 3) for column in (4, 5)}) == 4


def test_change_in_a_corner_affects_that_corner(wide: WorldModel, scene: np.ndarray) -> None:
    """Through the whole codec, whose convolutions reach a few cells only."""
    pixels = torch.from_numpy(scene).permute(2, 0, 1)[None, None].float() / 127.5 - 1
    other = pixels.clone()
    other[..., :4, -4:] *= -1
    latents = [wide.codec.encode(each.expand(-1, 2, -1, -1, -1)) for each in (pixels, other)]
    assert latents[0].shape[2:] == (4, ROWS, COLUMNS)
    change = (latents[1] - latents[0])[0, 0].permute(1, 2, 0).abs().amax(dim=-1)
    assert divmod(int(change.argmax()), COLUMNS) == (0, COLUMNS - 1)
    shown = (wide.codec.decode(latents[1]) - wide.codec.decode(latents[0])).abs()[0].amax(dim=(0, 1))
    row, column = divmod(int(shown.argmax()), WIDTH)
    assert shown.shape == (HEIGHT, WIDTH) and row < 16 and column >= WIDTH - 16


# A whole model


def loss_of(model: WorldModel, scene: np.ndarray) -> Tensor:
    """Return the loss of one step of the joint objective."""
    clip = np.random.default_rng(1).integers(0, 256, (8, HEIGHT, WIDTH, 3), dtype=np.uint8)
    episodes = [Episode("one", (scene[None], clip), (Action(LEFT),))]
    batch = Batch(step=0, task="rounds", indices=(0,), episodes=episodes, self_rollout=False)
    objective = OBJECTIVES["generator"](model)
    with torch.no_grad():
        prepared = objective.prepare(model, batch, SampleRng([(0,)]))
    sums = objective(model, prepared)
    terms = [
        weight / prepared.counts[name] * sums[name]
        for name, weight in objective.weights.items()
        if prepared.counts.get(name)
    ]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("merge", [1, 2])
def test_wide_frames_train_save_load_and_roll_out(
    make_model: Callable[..., WorldModel], scene: np.ndarray, tmp_path: Path, merge: int
) -> None:
    model = make_model(image_size=(HEIGHT, WIDTH), query_merge=merge)
    assert model.config.latent_shape == (4, 4, ROWS, COLUMNS)
    assert model.config.num_queries == len(model.queries) == ROWS * COLUMNS // merge**2
    parts = ("vision", "action", "queries", "state", "condition_adapter", "generator")
    freeze(model, StageConfig(train={part: TrainedConfig() for part in parts}, tasks={"rounds": 1.0}))
    moving = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(moving, lr=3e-3), []
    for _ in range(8):
        loss = loss_of(model, scene)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]

    folder = model.eval().requires_grad_(False).save_pretrained(tmp_path / "wide", dtype=torch.float32)
    assert json.loads((folder / "config.json").read_text())["model"]["codec"]["image_size"] == [HEIGHT, WIDTH]
    assert "8 frames of 48 x 32 pixels" in (folder / "README.md").read_text()
    loaded = WorldModel.from_pretrained(folder)
    assert loaded.config == model.config
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    sessions = [each.session(seed=3) for each in (model, loaded)]
    for session in sessions:
        assert np.array_equal(session.reset(scene)[0], scene)
    frames, again = (session.step(LEFT).frames for session in sessions)
    assert frames.shape == (8, HEIGHT, WIDTH, 3)
    assert np.array_equal(frames, again)
    fork = sessions[0].fork()
    assert np.array_equal(fork.step({"keys": ["left"]}).frames, sessions[0].step({"keys": ["left"]}).frames)
    assert isinstance(sessions[0].describe(), str)
    sessions[0].infer_action().check(model.config.action)
    assert model.session().reset(text="a red ball").shape[1:] == (HEIGHT, WIDTH, 3)
    with av.open(str(sessions[0].save(tmp_path / "out.mp4"))) as video:
        shown = next(video.decode(video=0))
        assert (shown.width, shown.height) == (8 * WIDTH, 8 * HEIGHT)
        first = shown.to_ndarray(format="rgb24").reshape(HEIGHT, 8, WIDTH, 8, 3).mean(axis=(1, 3))
    assert np.abs(first - scene).mean() < 12


def test_environment_of_wide_frames(wide: WorldModel, scene: np.ndarray) -> None:
    for obs_type, shape in (("frame", (HEIGHT, WIDTH, 3)), ("clip", (8, HEIGHT, WIDTH, 3))):
        env = WorldEnv(wide, start={"observation": scene}, obs_type=obs_type, render_mode="rgb_array")
        seen, _ = env.reset(seed=0)
        assert env.observation_space.shape == seen.shape == shape
        assert np.array_equal(seen if obs_type == "frame" else seen[-1], scene)
        assert env.step(env.action_space.sample())[0] in env.observation_space
    turned = replace(env.world_spec, image_size=(WIDTH, HEIGHT))
    env = WorldEnv(wide.session(), start={"observation": scene}, world_spec=turned)
    with pytest.raises(ConfigError, match=r"image_size is \(48, 32\)"):
        env.reset(seed=0)
