"""Keys and numbers that are also added to the queries (`query_actions`)."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from worldmodel.actions import Action, Camera, Pose
from worldmodel.config import ActionConfig
from worldmodel.errors import ConfigError
from worldmodel.models.action import WAVE_OCTAVES, ActionAdapter, with_waves
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, WorldState
from worldmodel.rollout.round import prepare
from worldmodel.train.objectives.rollout import RolloutWindow

TAKES = ActionConfig(text={"max_tokens": 16}, keys=("left", "right"), vector=2, camera=True, per_round=2)
ONE = Action(text="go on", keys=("right",), vector=(0.5, -2.0))
OTHER = Action(camera=Camera("velocity", Pose((0.0, 0.0, 1.0))), keys=("left", "right"))
CHUNKS = (Action(chunk=(ONE, OTHER)), Action(chunk=(OTHER, Action())), Action())


@pytest.fixture(scope="module")
def told(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A model whose queries know the controls; tests must not change it."""
    return make_model(action=TAKES, query_actions=True)


def test_all_queries_of_a_round_get_what_its_actions_hold(told: WorldModel) -> None:
    action, layer = told.action, told.action.to_queries
    assert layer is not None and layer.in_features == 2 * (2 + 2 + 9 + 2 * WAVE_OCTAVES * 3)
    held = torch.zeros(3, 2, 13 + 2 * WAVE_OCTAVES * 3)
    held[0, 0, 1] = held[0, 1, 0] = held[0, 1, 1] = held[1, 0, 0] = held[1, 0, 1] = 1
    held[0, 0, 2:4] = torch.tensor([0.5, -2.0])
    features = told.action._features(action.kinds[-1], OTHER)  # of a camera, nine numbers
    held[0, 1, 4:] = held[1, 0, 4:] = with_waves(torch.tensor([features]), 3)[0]
    encoded = told.encode_action(list(CHUNKS))
    assert encoded.on_queries is not None
    torch.testing.assert_close(encoded.on_queries, layer(held.flatten(1)))
    queries = torch.randn(3, told.config.num_queries, told.backbone.width)
    for index, (_, tokens, after) in enumerate(encoded.rows(queries, queries)):
        assert torch.equal(tokens, encoded.tokens[index])
        torch.testing.assert_close(after, queries[index] + encoded.on_queries[index])


def test_whole_numbers_have_the_waves_of_the_same_fractions(make_model: Callable[..., WorldModel]) -> None:
    model = make_model(
        action=ActionConfig(text=False, vector={"low": (-4,), "high": (4,)}), query_actions=True
    )
    whole, fraction, zero = (model.action._held(Action(vector=(x,))) for x in (1, 1.0, 0))
    mouse = make_model(action=ActionConfig(text=False, mouse="drag"), query_actions=True).action
    assert whole == fraction != zero
    assert mouse._held(Action(mouse=(0, 1, -1, 0))) == mouse._held(Action(mouse=(0.0, 1.0, -1.0, 0.0)))


def test_training_self_rollouts_and_sessions_agree(told: WorldModel, image: np.ndarray) -> None:
    world = WorldState.from_frames(told, image[None, None], (0,))
    context = world.context[:, None]
    for action in CHUNKS:
        taught = told(context, [[action]]).hidden[:, 0]
        rolled = RolloutWindow(told, [[action]]).play(0, world.context, None)
        inputs = prepare(told, [world], [action])
        played = LocalEngine(told.backbone).predict_states(inputs.histories, told.config.num_queries)
        torch.testing.assert_close(rolled, taught)
        torch.testing.assert_close(played, taught)
    left, right = (told(context, [[Action(keys=(key,))]]).hidden for key in ("left", "right"))
    assert (left - right).abs().max() > 1e-3


def test_weights_follow_the_names_of_keys_and_the_places_of_actions(told: WorldModel) -> None:
    width = told.backbone.width
    fewer = ActionConfig(text=False, keys=("right", "up"), vector=2, per_round=1)
    adapter = ActionAdapter(fewer, width, on_queries=True)
    assert adapter.to_queries is not None and isinstance(told.action.to_queries, nn.Linear)
    before = adapter.to_queries.weight.clone()
    adapter.load_state_dict(adapter.adapted(told.action.state_dict(), TAKES, lambda name: True))
    source = told.action.to_queries.weight
    after = adapter.to_queries.weight
    assert torch.equal(after[:, 0], source[:, 1])  # right, of the first action
    assert torch.equal(after[:, 1], before[:, 1])  # up is new
    assert torch.equal(after[:, 2:4], source[:, 2:4])
    assert "to_queries.weight" in adapter.new_weights


def test_a_model_without_controls_has_nothing_to_add(make_model: Callable[..., WorldModel]) -> None:
    with pytest.raises(ConfigError, match="query_actions"):
        make_model(action=ActionConfig(), query_actions=True)


def test_every_action_gives_gradients_for_the_same_weights(told: WorldModel) -> None:
    adapter = ActionAdapter(replace(TAKES, per_round=1), told.backbone.width, on_queries=True)
    encoded = adapter([Action()], told.backbone)
    assert encoded.on_queries is not None
    (encoded.tokens[0].sum() + encoded.on_queries.sum()).backward()
    assert all(parameter.grad is not None for parameter in adapter.parameters())
