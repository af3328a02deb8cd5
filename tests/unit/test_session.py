"""Sessions: determinism, forks, snapshots, and bounded memory."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from denoising import denoise
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from worldmodel import media
from worldmodel.actions import Action, Camera, Pose
from worldmodel.actions.words import NOTHING_HAPPENS
from worldmodel.config import ActionConfig
from worldmodel.episodes import WHAT_HAPPENED
from worldmodel.errors import ConfigError, InputError, OutputError, WorldModelError
from worldmodel.media.tensors import to_frames
from worldmodel.models.backbone.prefix_cache import History
from worldmodel.models.text import sequences
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import Session
from worldmodel.rollout.round import LocalEngine
from worldmodel.rollout.session import transition

LEFT, JUMP = "the red ball moves left", "the blue box jumps"
ROUND_TOKENS = 4 + 32 + 16
"""Vision tokens, one slot of action tokens, queries."""


@pytest.fixture
def session(model: WorldModel, image: np.ndarray) -> Session:
    started = model.session(seed=3)
    started.reset(image)
    return started


def cached(session: Session) -> int:
    """Positions that the session looks back on."""
    return sum(len(part) for part in session.state.histories[0])


def test_a_round_makes_one_chunk(session: Session, model: WorldModel) -> None:
    frames = session.step(LEFT).frames
    assert frames.shape == (model.config.chunk_frames, 32, 32, 3)
    assert frames.dtype == np.uint8
    session.step()
    assert session.frames.shape == (1 + 2 * model.config.chunk_frames, 32, 32, 3)
    assert [len(clip) for clip in session.clips] == [1, 8, 8]
    assert session.actions == (Action(LEFT), Action())


def test_the_seed_decides(model: WorldModel, image: np.ndarray) -> None:
    def played(seed: int) -> np.ndarray:
        session = model.session(seed)
        session.reset(image)
        for action in (LEFT, None, JUMP):
            session.step(action)
        return session.frames

    assert np.array_equal(played(1), played(1))
    assert not np.array_equal(played(1), played(2))


def test_a_session_equals_teacher_forcing_on_what_it_saw(model: WorldModel, image: np.ndarray) -> None:
    session = model.session()
    session.reset(image)
    contexts, actions = [], [Action(LEFT), Action(JUMP), Action()]
    forecasts = []
    for action in actions:
        contexts.append(session.state.context)
        session.step(action)
        forecasts.append(session.state.latents)
    prediction = model(torch.stack(contexts, dim=1), [actions])
    for index, made in enumerate(forecasts):
        generator = torch.Generator().manual_seed(index + 1)
        noise = torch.randn(made.shape, generator=generator)
        states = prediction.hidden[:, index]
        condition = model.condition(model.read_state(states, contexts[index]), contexts[index])
        again = denoise(model, condition, contexts[index], noise, model.config.num_inference_steps)
        torch.testing.assert_close(again, made, atol=2e-5, rtol=1e-4)


def test_a_fork_with_the_same_action_makes_the_same_frames(session: Session) -> None:
    session.step(LEFT)
    fork = session.fork()
    for action in (JUMP, None, LEFT):
        assert np.array_equal(session.step(action).frames, fork.step(action).frames)


def test_forks_with_different_actions_do_not_touch_each_other(session: Session) -> None:
    session.step(LEFT)
    one, other, untouched = session.fork(), session.fork(), session.fork()
    first, second = one.step(JUMP).frames, other.step("the blue box explodes").frames
    assert not np.array_equal(first, second)
    assert np.array_equal(session.step(JUMP).frames, first)
    assert np.array_equal(untouched.step("the blue box explodes").frames, second)
    assert len(one.clips) == len(other.clips) == 3


def test_restoring_a_snapshot_replays_exactly(session: Session) -> None:
    session.step(LEFT)
    moment = session.snapshot()
    played = [session.step(action).frames for action in (JUMP, LEFT, None)]
    for _ in range(2):
        session.restore(moment)
        assert len(session.clips) == 2
        assert all(
            np.array_equal(session.step(action).frames, frames)
            for action, frames in zip((JUMP, LEFT, None), played, strict=True)
        )


def test_the_cache_stays_within_the_window(session: Session, model: WorldModel) -> None:
    lengths = []
    for _ in range(8):
        session.step(LEFT)
        lengths.append(cached(session))
    assert model.config.history_rounds == 1
    assert [length / ROUND_TOKENS for length in lengths] == [1, 2, 3, 2, 3, 2, 3, 2]


@pytest.mark.parametrize("least", [0, 1, 3])
def test_a_round_sees_the_rounds_before_it(
    make_model: Callable[..., WorldModel], image: np.ndarray, least: int
) -> None:
    """At least `history_rounds`, at most twice as many, and always the newest."""

    class RecordingEngine(LocalEngine):
        def predict_states(self, histories: Sequence[History], num_queries: int) -> torch.Tensor:
            seen.append(histories[0])
            return super().predict_states(histories, num_queries)

    seen: list[History] = []
    model = make_model(history_rounds=least)
    session = Session(model, engine=RecordingEngine(model.backbone))
    session.reset(image)
    for _ in range(9):
        session.step(LEFT)
    played = [history[-1] for history in seen]
    for index, history in enumerate(seen):
        assert min(index, least) <= len(history) - 1 <= 2 * least
        rounds = played[index + 1 - len(history) : index + 1]
        assert all(torch.equal(one, other) for one, other in zip(history, rounds, strict=True))


def test_actions_change_the_next_frames(session: Session) -> None:
    assert not np.array_equal(session.fork().step(LEFT).frames, session.fork().step(JUMP).frames)
    assert not np.array_equal(
        session.fork().step({"keys": ["left"]}).frames, session.fork().step({"keys": ["right"]}).frames
    )


@pytest.mark.parametrize(
    "action",
    [
        None,
        LEFT,
        Action(LEFT),
        {"text": LEFT},
        {"keys": "left"},
        {"keys": ["left", "right"]},
        {"vector": [0.0, 1.5, -2]},
        {"text": LEFT, "keys": ("right",), "vector": (1, 2, 3)},
        {},
    ],
    ids=str,
)
def test_every_kind_of_action_is_taken(session: Session, action: object) -> None:
    assert session.step(action).frames.shape == (8, 32, 32, 3)
    assert len(session.actions) == 1


@pytest.mark.parametrize(
    ("action", "named"),
    [
        ("   ", "empty"),
        (7, "int"),
        ({"key": ["left"]}, "'key'"),
        ({"keys": ["lef"]}, "'left'"),
        ({"keys": ["jump"]}, "'jump'"),
        ({"vector": [1.0, 2.0]}, "2"),
        ({"vector": [1.0, float("nan"), 0.0]}, "vector"),
        ("ball " * 10_000, "10000"),
        ("left " * 90, "tokens"),
    ],
)
def test_an_unsupported_action_leaves_the_session_unchanged(
    session: Session, action: object, named: str
) -> None:
    session.step(LEFT)
    before = cached(session)
    with pytest.raises(InputError, match=named):
        session.step(action)
    assert cached(session) == before
    assert len(session.clips) == len(session.actions) + 1 == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=JSON | st.fixed_dictionaries({}, optional={"text": JSON, "keys": JSON, "vector": JSON}),
)
def test_any_json_is_an_action_or_an_input_error(model: WorldModel, value: object) -> None:
    try:
        action = Action.of(value)
        model.action.validate(action, model.backbone)
    except InputError:
        return
    assert Action.of(action) is action
    assert model.encode_action([action]).tokens[0].isfinite().all()


# Starts of a world


def test_reset_takes_arrays_images_bytes_and_files(
    model: WorldModel, image: np.ndarray, tmp_path: Path
) -> None:
    pillow = Image.fromarray(image)
    pillow.save(tmp_path / "frame.png")
    data = io.BytesIO()
    pillow.save(data, "PNG")
    given_as = [image, pillow, data.getvalue(), tmp_path / "frame.png", str(tmp_path / "frame.png")]
    first = [model.session().reset(source) for source in given_as]
    assert all(np.array_equal(frames, image[None]) for frames in first)


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_reset_continues_a_video(model: WorldModel, image: np.ndarray, tmp_path: Path, suffix: str) -> None:
    clip = np.stack([np.roll(image, 2 * index, axis=1) for index in range(8)])
    media.write_video(clip, tmp_path / f"clip{suffix}", fps=model.config.fps)
    session = model.session()
    seen = session.reset(tmp_path / f"clip{suffix}")
    assert seen.shape == (8, 32, 32, 3)
    # A GIF counts hundredths of a second, so the frame on screen at 7/8 s may be the one before.
    assert min(np.abs(seen[-1].astype(int) - frame).mean() for frame in clip[-2:]) < 12
    assert session.step(LEFT).frames.shape == (8, 32, 32, 3)


def test_a_long_video_is_cut_to_its_end(model: WorldModel, image: np.ndarray, tmp_path: Path) -> None:
    clip = np.stack([np.roll(image, index, axis=1) for index in range(40)])
    media.write_video(clip, tmp_path / "clip.mp4", fps=model.config.fps)
    session = model.session()
    seen = session.reset(tmp_path / "clip.mp4")
    # Room for one earlier observation is kept, so that two can be compared.
    assert len(seen) == (model.config.vision.max_frames - 1) * model.config.codec.temporal_factor
    assert np.abs(seen[-1].astype(int) - clip[-1]).mean() < 12
    assert isinstance(session.describe(), str)
    session.observe(tmp_path / "clip.mp4")
    assert isinstance(session.infer_action(), Action)


def test_reset_imagines_a_text(model: WorldModel) -> None:
    session = model.session(seed=1)
    frames = session.reset(text="night background, a small red ball at the left")
    assert frames.shape[1:] == (32, 32, 3)
    assert np.array_equal(
        model.session(seed=1).reset(text="night background, a small red ball at the left"), frames
    )
    assert not np.array_equal(model.session(seed=1).reset(text="dusk background, nothing"), frames)
    assert session.step(LEFT).frames.shape == (8, 32, 32, 3)


def test_reset_begins_anew(session: Session, model: WorldModel, image: np.ndarray) -> None:
    session.step(LEFT)
    session.reset(image)
    fresh = model.session(seed=3)
    fresh.reset(image)
    assert np.array_equal(session.step(JUMP).frames, fresh.step(JUMP).frames)
    assert session.actions == (Action(JUMP),)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"observation": np.zeros((32, 32, 3), np.uint8), "text": "night background"},
        {"text": " "},
        {"text": "ball " * 10_000},
        {"observation": "missing.png"},
        {"observation": b"not an image"},
        {"observation": np.zeros((0, 32, 3), np.uint8)},
        {"observation": np.full((32, 32, 3), 255.0, np.float32)},
        {"observation": torch.zeros(32, 32, 7, dtype=torch.uint8)},
        {"observation": [np.zeros((32, 32, 3), np.uint8)]},
        {"observation": io.BytesIO(b"x")},
        {"observation": 3},
        {"text": "\ud800"},
    ],
)
def test_invalid_reset_keeps_the_world(session: Session, arguments: dict[str, object]) -> None:
    session.step(LEFT)
    with pytest.raises(InputError):
        session.reset(**arguments)
    assert len(session.clips) == 2


def test_frames_in_memory_are_cut_to_their_end(model: WorldModel, image: np.ndarray) -> None:
    clip = np.zeros((int(media.MediaLimits.max_video_s * model.config.fps) + 9, 32, 32, 3), np.uint8)
    clip[-1] = image
    assert np.array_equal(model.session().reset(clip)[-1], image)


def test_seeds_are_integers_of_any_kind(session: Session, model: WorldModel, image: np.ndarray) -> None:
    other = model.session(seed=np.int64(session.seed))
    other.reset(image)
    assert np.array_equal(other.step(LEFT).frames, session.step(LEFT).frames)


@pytest.mark.parametrize("scale", [101.0, -1e38, math.inf, math.nan])
def test_guidance_that_overflows_is_refused(model: WorldModel, scale: float) -> None:
    with pytest.raises(ConfigError, match="guidance_scale"):
        model.session(guidance_scale=scale)


def test_guidance_needs_a_model_that_was_trained_for_it(make_model: Callable[..., WorldModel]) -> None:
    generator = make_model().config.generator
    assert generator is not None
    model = make_model(generator=replace(generator, condition_dropout=0.0))
    with pytest.raises(ConfigError, match="trained without"):
        model.session(guidance_scale=2.0)


def test_a_snapshot_of_another_model_is_refused(
    session: Session, make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    other = make_model(image_size=64).session()
    with pytest.raises(InputError, match="another model"):
        other.restore(session.snapshot())


def test_calls_before_reset_are_input_errors(model: WorldModel) -> None:
    session = model.session()
    acts: list[Callable[[], object]] = [
        session.step,
        session.describe,
        session.infer_action,
        session.snapshot,
        session.fork,
        lambda: session.frames,
        lambda: session.save("never.gif"),
    ]
    for act in acts:
        with pytest.raises(InputError, match="reset"):
            act()
    assert not Path("never.gif").exists()


@pytest.mark.parametrize("settings", [{"num_inference_steps": -1}, {"guidance_scale": float("nan")}])
def test_settings_out_of_range_are_config_errors(model: WorldModel, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        model.session(**settings)


def test_zero_steps_show_the_forecast_without_the_generator(
    model: WorldModel, image: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session(num_inference_steps=0)
    session.reset(image)
    context = session.state.context
    with torch.no_grad():
        forecast = model(context[:, None], [[Action.of(LEFT)]]).condition.forecast
        expected = to_frames(model.decode(forecast, context)[0])
    monkeypatch.setattr(model, "config", replace(model.config, num_inference_steps=0))
    by_default = model.session()
    by_default.reset(image)
    monkeypatch.setattr(model.generator, "velocity", None)  # calling it would fail
    for each in (session, by_default):
        assert np.abs(each.step(LEFT).frames.astype(int) - expected).max() <= 1


# Words about it, and files


def test_describe_answers_and_is_deterministic(session: Session) -> None:
    session.step(LEFT)
    assert session.describe() == session.describe()
    assert isinstance(session.describe("how many things are there"), str)
    for question in (" ", "why " * 200):
        with pytest.raises(InputError, match="question"):
            session.describe(question)


def test_describing_leaves_the_world_as_it_is(session: Session) -> None:
    fork = session.fork()
    fork.step(LEFT)
    session.step(LEFT)
    session.describe()
    session.infer_action()
    assert np.array_equal(session.step(JUMP).frames, fork.step(JUMP).frames)


def test_infer_action_needs_two_observations(session: Session, image: np.ndarray) -> None:
    with pytest.raises(InputError):
        session.infer_action()
    session.observe(np.roll(image, 4, axis=1))
    inferred = session.infer_action()
    inferred.check(session.model.config.action)


def test_an_observed_round_is_remembered_like_a_generated_one(
    session: Session, model: WorldModel, image: np.ndarray
) -> None:
    foreseen, before = session.step(LEFT).frames, session.fork()
    real = model.session(seed=3)
    real.reset(image)
    seen = real.observe(foreseen, LEFT)
    assert np.array_equal(seen, foreseen)
    assert real.actions == (Action(LEFT),) and len(real.clips) == 2
    ((kept,),), ((told,),) = before.state.histories, real.state.histories
    assert torch.equal(kept, told)

    real.step(JUMP)
    before.step(JUMP)
    assert torch.equal(real.state.histories[0][0], before.state.histories[0][0])
    assert len(real.state.histories[0]) == 2
    assert real.state.round == before.state.round == 2


def test_what_follows_an_observation_depends_on_the_action_before(
    model: WorldModel, image: np.ndarray
) -> None:
    after, futures = np.roll(image, 4, axis=1), []
    for action in (LEFT, JUMP, None):
        session = model.session(seed=3)
        session.reset(image)
        assert np.array_equal(session.observe(after, action)[0], after)
        futures.append(session.step(JUMP).frames)
    assert not np.array_equal(futures[0], futures[1])
    assert not np.array_equal(futures[0], futures[2])


def test_an_observed_round_moves_the_camera(make_model: Callable[..., WorldModel], image: np.ndarray) -> None:
    session = make_model(action=ActionConfig(camera=True)).session()
    session.reset(image)
    move = Action(camera=Camera("velocity", Pose((1.0, 0.0, 0.0))))
    session.observe(image, move)
    session.observe(image)
    (camera,) = session.state.cameras
    assert camera.translation == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["out.mp4", "out.gif", "out.png", "deep/er/OUT.MP4"])
def test_save_writes_the_rollout(session: Session, tmp_path: Path, name: str) -> None:
    session.step(LEFT)
    session.step()
    path = session.save(tmp_path / name)
    assert path == tmp_path / name
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    if path.suffix == ".png":
        with Image.open(path) as sheet:
            assert min(sheet.size) >= 32
        return
    again = media.read_video(path, size=32, fps=None, max_frames=99)
    assert again.shape == session.frames.shape
    assert np.abs(again.astype(int) - session.frames).mean() < 12


def test_save_refuses_a_name_it_cannot_write(session: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for name in ("out.webm", "out", "file/out.gif", "file/out.png"):
        with pytest.raises(OutputError) as caught:
            session.save(tmp_path / name)
        assert isinstance(caught.value, WorldModelError)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_confidence_is_the_likelihood_of_the_words_less_that_of_nothing(model: WorldModel) -> None:
    session = model.session(seed=1)
    session.reset(text="a red ball")
    with pytest.raises(InputError, match="only one observation"):
        session.confidence("the ball jumps")
    session.step("the ball jumps")

    def likelihood(words: str) -> float:
        observation = transition(model, session.state)
        ((embeds, labels),) = sequences(model, [observation], [WHAT_HAPPENED], [words])
        scores = model.backbone.logits(model.backbone(embeds[None])[0]).log_softmax(dim=-1)
        told = [scores[row, label].item() for row, label in enumerate(labels.tolist()) if label >= 0]
        assert len(told) == len(model.backbone.token_ids(words)) + 1
        return sum(told) / len(told)

    expected = likelihood("the ball jumps") - likelihood(NOTHING_HAPPENS)
    assert session.confidence("the ball jumps") == pytest.approx(expected, abs=1e-4)
    assert session.confidence(NOTHING_HAPPENS) == pytest.approx(0, abs=1e-5)
