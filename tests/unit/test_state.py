"""The predicted state: its code, its forecast, and how futures are drawn, listed and remembered."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.config import StateConfig, WorldModelConfig
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.code import CodeSampling, divergence, draw, straight_through
from worldmodel.models.conditioning import Codes
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, SamplingParams, WorldState, play_round
from worldmodel.rollout.round import draw_uniform
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.codec import reconstruction_error
from worldmodel.train.objectives.state import StateObjective, predict_windows

CODED = StateConfig(width=32, num_layers=1, num_heads=2, code_groups=3, code_classes=4)
BLOCKS = replace(CODED, code_groups=2, code_block=2)


@pytest.fixture(scope="module")
def coded(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A model whose states have a code, with random weights and a prior that is far from certain."""
    return make_model(state=CODED, num_inference_steps=0, generator=None)


def started(model: WorldModel, image: np.ndarray, *seeds: int) -> list[WorldState]:
    sessions = [model.session(seed) for seed in seeds]
    for session in sessions:
        session.reset(image)
    return [session.state for session in sessions]


# ---- drawing ------------------------------------------------------------------------------------------


def test_draws_have_the_probabilities_of_the_logits() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    draws = (torch.arange(10_000) + 0.5) / 10_000
    rows = logits.expand(10_000, -1)

    def shares(sampling: CodeSampling) -> torch.Tensor:
        return torch.bincount(draw(rows, draws, sampling), minlength=4) / 10_000

    torch.testing.assert_close(shares(CodeSampling()), logits.softmax(0), atol=2e-4, rtol=0)
    hot = shares(CodeSampling(temperature=2.0))
    torch.testing.assert_close(hot, (logits / 2).softmax(0), atol=2e-4, rtol=0)
    two = shares(CodeSampling(top_k=2))
    assert two[[1, 3]].tolist() == [0, 0] and float(two[2]) == pytest.approx(
        float(logits[[0, 2]].softmax(0)[1]), abs=2e-4
    )
    assert shares(CodeSampling(temperature=0)).tolist() == [0, 0, 1, 0]
    assert draw(rows[:1], None, CodeSampling()).tolist() == [2]


def test_codes_are_drawn_with_the_probabilities_that_the_prior_states(coded: WorldModel) -> None:
    """The autoregressive sampler agrees with the log-probabilities that training uses."""
    head = coded.state
    assert head is not None and head.code is not None
    torch.manual_seed(0)
    hidden = torch.randn(1, coded.config.num_queries, coded.backbone.width)
    context = torch.randn(1, 1, *coded.blank_latents.shape[-3:])
    draws = torch.rand(1, 20_000, head.code.length)
    codes = head.draw(hidden, context, draws, CodeSampling())[0]
    distinct, counts = codes.unique(dim=0, return_counts=True)
    state = head(
        hidden.expand(len(distinct), -1, -1), context.expand(len(distinct), -1, -1, -1, -1), distinct
    )
    stated = state.log_probability.exp()
    assert len(distinct) > 5 and stated.sum() > 0.99
    torch.testing.assert_close(counts / 20_000, stated, atol=0.015, rtol=0)


def test_gradients_of_a_sampled_code_are_those_of_its_probabilities() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    code = straight_through(logits.log_softmax(-1), torch.rand(2, 3))
    assert torch.equal(code.detach().sum(-1), torch.ones(2, 3)) and set(code.detach().unique().tolist()) == {
        0,
        1,
    }
    weights = torch.randn(2, 3, 4)
    (code * weights).sum().backward()
    other = logits.detach().clone().requires_grad_()
    (other.softmax(-1) * weights).sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)
    assert divergence(logits.log_softmax(-1), logits.log_softmax(-1)).tolist() == [0, 0]


# ---- rollouts -----------------------------------------------------------------------------------------


def test_one_seed_is_one_future_in_forks_batches_and_snapshots(coded: WorldModel, image: np.ndarray) -> None:
    actions = ["left", "right", "left"]
    session = coded.session(5)
    session.reset(image)
    alone = [session.step(action) for action in actions]
    codes = [each.state.code for each in alone if each.state]
    assert len(set(codes)) > 1  # rounds draw anew

    again = coded.session(5)
    again.reset(image)
    again.step(actions[0])
    middle, fork = again.snapshot(), again.fork()
    for other in (fork, again):
        assert [other.step(action).state for action in actions[1:]][-1].code == codes[-1]
    again.restore(middle)
    assert np.array_equal(again.step(actions[1]).frames, alone[1].frames)

    engine, params = LocalEngine(coded.backbone), SamplingParams(0)
    worlds = started(coded, image, 4, 5, 6)
    for action in actions:
        worlds = play_round(coded, engine, worlds, [Action.of(action)] * 3, params)
    assert worlds[1].states[0].code == codes[-1]
    assert np.abs(worlds[1].frames[0].astype(int) - alone[-1].frames).max() <= 1
    assert len({world.states[0].code for world in worlds}) > 1


def test_temperature_zero_is_the_most_likely_future_of_every_seed(
    coded: WorldModel, image: np.ndarray
) -> None:
    made = []
    for seed in (0, 1, 2):
        session = coded.session(seed, temperature=0)
        session.reset(image)
        made.append(session.step("left").state)
    assert len({each.code for each in made}) == 1
    drawn = [coded.session(seed) for seed in range(8)]
    for session in drawn:
        session.reset(image)
    likely = [session.step("left").state.log_probability for session in drawn]
    assert len(set(likely)) > 1 and max(likely) <= made[0].log_probability + 1.5


def test_the_next_round_knows_what_was_decided(coded: WorldModel, image: np.ndarray) -> None:
    (world,) = started(coded, image, 0)
    engine, params = LocalEngine(coded.backbone), SamplingParams(0)
    (after,) = play_round(coded, engine, [world], [Action.of("left")], params)
    assert after.code is not None and world.code is None
    other = replace(after, code=after.code.roll(1, dims=-1))
    tokens = [
        play_round(coded, engine, [each], [Action.of("left")], params)[0].histories[0][-1]
        for each in (after, other)
    ]
    assert not torch.equal(*tokens)


def test_what_was_observed_has_the_code_of_the_posterior(coded: WorldModel, image: np.ndarray) -> None:
    session = coded.session(0)
    session.reset(image)
    frames = session.fork().step("left").frames
    session.observe(frames, "left")
    state = session.state
    assert coded.state is not None and state.code is not None and state.states == ()
    context = started(coded, image, 0)[0].context
    expected = coded.state.posterior(context, state.latents).argmax(dim=-1)
    assert torch.equal(state.code.argmax(dim=-1), expected)


def test_training_draws_what_a_rollout_sees(coded: WorldModel, image: np.ndarray) -> None:
    """Teacher forcing with the codes of a rollout gives the states of that rollout, in windows, too."""
    (world,) = started(coded, image, 3)
    engine, params = LocalEngine(coded.backbone), SamplingParams(0)
    worlds, actions = [world], [Action.of(text) for text in ("left", "right", "left", "right")]
    for action in actions:
        worlds.append(play_round(coded, engine, [worlds[-1]], [action], params)[0])
    context = torch.stack([each.context for each in worlds[:-1]], dim=1)
    codes = Codes(torch.stack([each.code for each in worlds[1:]], dim=1))
    made = predict_windows(coded, context, [actions], None, codes)
    size = coded.config.context_rounds
    for index, after in enumerate(worlds[1:][:size]):
        torch.testing.assert_close(
            made.state.cells[index].mean(dim=0).numpy(), after.states[0].features, atol=1e-4, rtol=1e-3
        )


# ---- futures ------------------------------------------------------------------------------------------


def test_futures_are_distinct_complete_and_include_the_next_step(
    coded: WorldModel, image: np.ndarray
) -> None:
    session = coded.session(2)
    session.reset(image)
    before = session.snapshot()
    found = session.futures("left", num_draws=64, max_futures=64)
    assert session.snapshot().state is before.state
    assert sum(each.probability for each in found) == pytest.approx(1)
    assert [each.probability for each in found] == sorted((each.probability for each in found), reverse=True)
    step = session.fork().step("left")
    nearest = min(np.abs(each.frames.astype(int) - step.frames).mean() for each in found)
    assert nearest < 12  # of the same future, though perhaps by another code
    taken = session.choose(found[0])
    assert np.array_equal(taken.frames, found[0].frames) and taken.state == found[0].state
    with pytest.raises(InputError, match="another moment"):
        session.choose(found[0])
    assert len(session.step("right").frames) == coded.config.chunk_frames


def test_equal_futures_are_one(make_model: Callable[..., WorldModel], image: np.ndarray) -> None:
    model = make_model(state=CODED, num_inference_steps=0, generator=None)
    assert model.state is not None and model.state.code is not None
    with torch.no_grad():  # the code is drawn as before, and changes nothing
        model.state.code.embedding.zero_()
    session = model.session()
    session.reset(image)
    (only,) = session.futures("left", num_draws=64)
    assert only.probability == 1
    assert np.array_equal(only.frames, session.step("left").frames)


def test_a_model_without_a_code_lists_no_futures(model: WorldModel, image: np.ndarray) -> None:
    session = model.session()
    session.reset(image)
    with pytest.raises(InputError, match="code_groups"):
        session.futures("left")
    assert session.step("left").state.code == ()


# ---- shapes of states ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"state": BLOCKS, "generator": None, "num_inference_steps": 0},
        {"state": replace(BLOCKS, merge=2, code_block=1)},
        {"state": replace(CODED, merge=4), "query_merge": 2},
        {"state": CODED, "query_merge": 4},
    ],
    ids=["blocks", "coarse-blocks", "coarser-than-queries", "finer-than-queries"],
)
def test_states_of_other_shapes_are_played_and_trained(
    make_model: Callable[..., WorldModel], image: np.ndarray, settings: dict[str, Any]
) -> None:
    model: WorldModel = make_model(**settings)
    head, config = model.state, model.config.state
    assert head is not None and head.code is not None and config is not None
    side = config.code_block or head.grid[0]
    assert head.code.length == config.code_groups * (head.grid[0] // side) * (head.grid[1] // side)
    session = model.session(0)
    session.reset(image)
    result = session.step("left")
    assert result.frames.shape == (8, 32, 32, 3) and len(result.state.code) == head.code.length
    (world,) = started(model, image, 0)
    hidden = torch.randn(1, model.config.num_queries, model.backbone.width)
    state = model.read_state(hidden, world.context)
    squares = state.forecast.unfold(3, config.merge, config.merge).unfold(4, config.merge, config.merge)
    assert (squares == squares[..., :1, :1]).all()  # equal within a cell of the state
    torch.testing.assert_close(head.target(state.forecast), state.forecast)


def test_a_code_of_a_block_changes_its_block_first(make_model: Callable[..., WorldModel]) -> None:
    head = make_model(state=BLOCKS).state
    assert head is not None and head.code is not None
    head.layers, head.from_code = torch.nn.ModuleList(), torch.nn.ModuleList()
    vectors = head.code.vectors(torch.eye(4)[torch.zeros(1, head.code.length, dtype=torch.long)])
    other = torch.zeros(1, head.code.length, dtype=torch.long)
    other[0, -1] = 1  # the last variable: of the last block
    changed = (head.code.vectors(torch.eye(4)[other]) - vectors).abs().sum(-1)[0]
    assert changed.nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"state": None}, "state"),
        ({"state": StateConfig(merge=3)}, "merge"),
        ({"state": replace(CODED, code_block=3)}, "code_block"),
    ],
)
def test_states_that_do_not_fit_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WorldModelConfig(**settings)
    with pytest.raises(ConfigError, match="code_classes"):
        StateConfig(code_classes=1)


def test_settings_of_sampling_are_checked(coded: WorldModel, model: WorldModel) -> None:
    for settings in ({"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            coded.session(**settings)
    with pytest.raises(ConfigError, match="no code"):
        model.session(temperature=0.5)


def test_a_snapshot_of_another_code_is_refused(
    coded: WorldModel, make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    session = coded.session()
    session.reset(image)
    session.step("left")
    other = make_model(state=replace(CODED, code_classes=5), num_inference_steps=0, generator=None)
    with pytest.raises(InputError, match="another model"):
        other.session().restore(session.snapshot())


# ---- training -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_code_learns_which_of_two_futures_happened(make_model: Callable[..., WorldModel]) -> None:
    """One action leads to a white or a black picture: a code learns both, and without one their mean is."""
    episodes = []
    for shade in (0, 255):
        clips = (np.full((1, 32, 32, 3), 128, np.uint8), np.full((8, 32, 32, 3), shade, np.uint8))
        episodes.append(Episode(str(shade), clips, (Action(text="left"),)))
    errors = {}
    for name, state in {"code": CODED, "none": replace(CODED, code_groups=0)}.items():
        model: WorldModel = make_model(state=state, generator=None, num_inference_steps=0)
        model.requires_grad_(True)
        model.codec.requires_grad_(False)
        assert model.state is not None
        model.state.train()
        objective = StateObjective(model, free_nats=1.0)
        optimizer = torch.optim.AdamW(model.state.parameters(), lr=3e-3)
        batch = Batch(0, "rounds", (0, 1), episodes)
        nats = 0.0
        for step in range(90):
            rng = SampleRng([(step, 0), (step, 1)])
            with torch.no_grad():
                inputs = objective.prepare(model, batch, rng)
            losses = objective(model, inputs)
            total = sum(
                objective.weights[key] * losses[key] / max(inputs.counts[key], 1)
                for key in ("changed", "unchanged", "prior", "rate")
                if key in losses
            )
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            nats = float(losses["nats"]) / 2 if "nats" in losses else 0.0
        model.eval()
        with torch.no_grad():
            inputs = objective.prepare(model, batch, SampleRng([(9, 0), (9, 1)]))
            codes, _ = objective.codes(model, inputs)
            forecast = objective.predict(model, inputs, codes).state.forecast
            target = inputs.content.target.flatten(0, 1)
            errors[name] = float((forecast - target).pow(2).mean() / target.var())
            if codes is not None:
                assert not torch.equal(codes.code[0], codes.code[1])
                assert nats == pytest.approx(np.log(2), abs=0.35)
    assert errors["code"] < 0.2 * errors["none"]


def test_the_forecast_is_compared_in_pixels_where_a_stage_asks_for_it(
    make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    model = make_model(generator=None, num_inference_steps=0)
    clips = (image[None], np.random.default_rng(0).integers(0, 255, (8, *image.shape), dtype=np.uint8))
    batch = Batch(0, "rounds", (0,), [Episode("a", clips, (Action(text="left"),))])
    objective = StateObjective(model)

    @torch.no_grad()
    def losses() -> dict[str, float]:
        inputs = objective.prepare(model, batch, SampleRng([(0,)]))
        found = objective(model, inputs)
        return {
            name: float(value / inputs.counts[name]) for name, value in found.items() if inputs.counts[name]
        }

    without = losses()
    objective.weights = {**objective.weights, "forecast_pixel": 0.3}
    found = losses()
    assert {name: value for name, value in found.items() if name != "forecast_pixel"} == without
    with torch.no_grad():
        inputs = objective.prepare(model, batch, SampleRng([(0,)]))
        forecast = objective.predict(model, inputs).state.forecast
        assert forecast is not None
        made, true = (model.codec.decode(x[0, :, None]) for x in (forecast, inputs.content.target[0]))
        errors = reconstruction_error(made, true)  # of every latent frame, one of which is drawn
    assert any(found["forecast_pixel"] == pytest.approx(float(error), rel=1e-4) for error in errors)


def test_draws_of_codes_and_noise_differ() -> None:
    assert not torch.equal(draw_uniform([(0, 0)], 4), draw_uniform([(0, 1)], 4))
    assert torch.equal(draw_uniform([(0, 0), (7, 3)], 4)[1], draw_uniform([(7, 3)], 4)[0])


def test_objectives_of_states_need_one(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="free_nats"):
        StateObjective(model, free_nats=-1)
