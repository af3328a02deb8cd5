"""Texts about a world that read its earlier rounds, as predictions do."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from worldmodel import config as configs
from worldmodel import shapes
from worldmodel.config import SMALL_DECODER, DataConfig, SourceConfig, StateConfig, WorldModelConfig
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.eval.goals import measured
from worldmodel.eval.runner import ModelSubject
from worldmodel.models import text
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.state import newest_observation
from worldmodel.shapes.evaluation.goals import GOALS
from worldmodel.shapes.evaluation.recall import recalled
from worldmodel.shapes.recall import KINDS, NOTHING, sample_recall
from worldmodel.shapes.source import ShapesSource, open_source
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.state import StateObjective
from worldmodel.train.tokenizer import build_tokenizer

SEED = 3


@pytest.fixture(scope="module")
def model() -> WorldModel:
    config = configs.load("shapes_memory")
    architecture = {**SMALL_DECODER, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    architecture |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    action = replace(config.model.action, mouse="drag", vector=2, camera=True)
    parts = {
        "text_history": True,
        "action": action,
        "backbone": replace(config.model.backbone, architecture=architecture),
        "codec": replace(config.model.codec, widths=(8, 16)),
        "state": StateConfig(width=64, num_layers=1),
        "vision": replace(config.model.vision, width=16),
    }
    torch.manual_seed(0)
    made = WorldModel.from_config(replace(config.model, **parts), build_tokenizer(config))
    return made.eval().requires_grad_(False)


def asked(kind: str, rounds: int, count: int = 3) -> list:
    """Return episodes of one kind of question."""
    source = ShapesSource("recall")
    indices = [KINDS.index(kind) + len(KINDS) * number for number in range(200)]
    found = [source.episode("ask", SEED, index, rounds) for index in indices]
    return [each for each in found if len(each.actions) == rounds][:count]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_text_is_trained_on_the_prefix_that_a_session_has(
    model: WorldModel, kind: str, rounds: int
) -> None:
    episodes = asked(kind, rounds)
    objective = StateObjective(model)
    objective.context_noise = 0.0
    batch = Batch(0, "ask", tuple(range(len(episodes))), episodes, False)
    rng = SampleRng([(row,) for row in range(len(episodes))], model.device, model.dtype)
    inputs = objective.prepare(model, batch, rng)
    rows = trained_rows(objective, model, inputs)
    for episode, row in zip(episodes, rows, strict=True):
        session = model.session()
        session.reset(episode.observations[0][-1])
        for action, clip in zip(episode.actions, episode.observations[1:], strict=True):
            session.observe(clip, action)
        seen = newest_observation(model, session.state)
        ((own, _),) = text.sequences(model, [seen], [episode.prompt], [episode.answer])
        assert torch.allclose(own, row, atol=1e-5)
        without = replace(seen, before=())
        ((short, _),) = text.sequences(model, [without], [episode.prompt], [episode.answer])
        assert len(own) - len(short) == rounds * model.round_tokens


def trained_rows(objective: StateObjective, model: WorldModel, inputs: object) -> list[torch.Tensor]:
    """Return the sequences whose loss an objective computes."""
    found: list[torch.Tensor] = []
    made = text.sequences

    def kept(*args, **kwargs):
        rows = made(*args, **kwargs)
        found.extend(row for row, _ in rows)
        return rows

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(text, "sequences", kept)
        losses = objective(model, inputs)
    assert losses["nll"] > 0
    return found


def test_a_description_depends_on_earlier_rounds_only_where_texts_read_them(model: WorldModel) -> None:
    session = model.session()
    session.reset(shapes.render(shapes.random_scene(np.random.default_rng(0))))
    first = newest_observation(model, session.state)
    assert first.before == ()
    for _ in range(3):
        session.step("the red ball moves right")
    before = newest_observation(model, session.state).before
    assert len(before[0]) == 3 * model.round_tokens
    assert isinstance(session.describe("what is hidden"), str)
    plain = replace(model.config, text_history=False)
    model.config, kept = plain, model.config
    try:
        assert newest_observation(model, session.state).before == ()
    finally:
        model.config = kept


def test_questions_are_answered_by_earlier_rounds_alone() -> None:
    for kind in KINDS:
        answers = set()
        for index in range(24):
            first, again = (sample_recall(SEED, index, 2, kind) for _ in range(2))
            assert (first.prompt, first.answer) == (again.prompt, again.answer)
            answers.add(first.answer)
            if kind == "hidden" and first.answer != NOTHING:
                last = first.samples[-1].clip
                colours = {
                    found.colour for found in shapes.find_objects(last.frames[-1], last.after.background)
                }
                assert first.answer.split()[1] not in colours
        assert answers == {"yes", "no"} if kind == "a goal" else len(answers) > 5


def test_the_evaluation_asks_worlds_and_lone_observations(model: WorldModel) -> None:
    figures = recalled(ModelSubject(model), 2, SEED, recall_rounds=(1,))
    assert set(figures) == {f"{kind}, 1 rounds" for kind in KINDS}
    for rates in figures.values():
        assert rates["right"]["n"] == rates["alone"]["n"] == 2
    assert [row.path[1] for row in measured(GOALS, {"recall": figures})] == list(figures)


def test_a_model_whose_texts_read_no_history_is_not_trained_on_such_questions() -> None:
    config = DataConfig(sources={"asked": SourceConfig(kind="shapes", split="recall")})
    with pytest.raises(ConfigError, match="text_history"):
        open_source("asked", config, WorldModelConfig())
    assert open_source("asked", config, WorldModelConfig(text_history=True)).tasks == ("ask",)
