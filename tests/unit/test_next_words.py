"""State alignment: the states tell the words for what is new on a cell after the action."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from worldmodel.config import DataConfig, TrainConfig
from worldmodel.data import loader
from worldmodel.errors import ConfigError
from worldmodel.models.loading import deferred
from worldmodel.shapes import sample_clip
from worldmodel.shapes.scene import half_side_of
from worldmodel.shapes.source import LABEL_WORDS, ShapesSource
from worldmodel.train import distributed, start
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.state import StateObjective
from worldmodel.train.trainer import Trainer

WORDS = [word for words in LABEL_WORDS.values() for word in words]


@pytest.fixture
def config(run_config: TrainConfig) -> TrainConfig:
    """A run of single acts, in one round each."""
    single = dataclasses.replace(run_config.data.sources["shapes"], split="single")
    stage = dataclasses.replace(
        run_config.stages["state"], tasks={"rounds": 1.0}, rounds=1, self_rollout=(0, 0), batch_size=8
    )
    return dataclasses.replace(run_config, data=DataConfig({"shapes": single}), stages={"state": stage})


def test_the_words_of_an_object_that_appears_are_on_its_cells_and_nowhere_else() -> None:
    source, seen = ShapesSource("arrivals"), 0
    for index in range(0, 20, 2):
        clip = sample_clip("arrivals", 0, index).clip
        colours = {obj.colour for obj in clip.before.objects}
        arrived = [obj for obj in clip.after.objects if obj.colour not in colours]
        labels = source.episode("rounds", 0, index).labels
        assert labels is not None
        next_words = labels["next_words"].reshape(8, 8, len(WORDS))
        expected = np.zeros((8, 8), dtype=bool)
        for obj in arrived:
            seen += 1
            near = np.abs(np.arange(8) * 8 + 3.5 - np.array([[obj.y], [obj.x]])) <= half_side_of(obj)
            expected |= near[0][:, None] & near[1]
        assert np.array_equal(next_words.any(axis=-1), expected)
        for obj in arrived:
            told = {WORDS[word] for word in np.flatnonzero(next_words[expected].all(axis=0))}
            assert told == {obj.colour, obj.shape, obj.size, clip.after.background}
    assert seen > 5


def test_where_nothing_happens_nothing_is_new() -> None:
    source = ShapesSource("single")
    still = [
        labels["next_words"].any()
        for index in range(100)
        if (labels := source.episode("rounds", 0, index).labels)
        and sample_clip("single", 0, index).clip.before == sample_clip("single", 0, index).clip.after
    ]
    assert still and not any(still)


def test_states_learn_the_words(config: TrainConfig) -> None:
    stage = dataclasses.replace(config.stages["state"], steps=20, lr=1e-2, microbatch_size=8)
    config = dataclasses.replace(config, stages={"state": stage})
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, "state", mesh, None)
        batches = next(iter(loader.batches(config.data, config.model, stage, seed=0)))
        losses = [trainer.step(batches, stop=False).losses for _ in range(stage.steps)]
    finally:
        distributed.shutdown()
    for kind in LABEL_WORDS:
        assert losses[-1][f"next_{kind}"] < 0.7 * losses[0][f"next_{kind}"]


@pytest.mark.parametrize("merge", [1, 2])
def test_loss_is_the_cross_entropy_of_the_words_of_each_query(config: TrainConfig, merge: int) -> None:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, query_merge=merge))
    model = start.build_model(config)
    deferred.materialize(model, torch.device("cpu"))
    deferred.load_shards(model)
    objective = StateObjective(model)
    batch = next(iter(loader.batches(config.data, config.model, config.stages["state"], seed=1)))[0]
    rng = SampleRng([(row,) for row in range(len(batch.episodes))])
    with torch.no_grad():
        inputs = objective.prepare(model, batch, rng)
        prediction = objective.predict(model, inputs)
        losses = objective.state_losses(model, inputs, prediction, None)
    side, offset = 8 // merge, 0
    for kind, words in LABEL_WORDS.items():
        total, count = 0.0, 0
        for row, episode in enumerate(batch.episodes):
            assert episode.labels is not None
            cells = episode.labels["next_words"][..., offset : offset + len(words)]
            for query in range(side * side):
                top, left = (merge * each for each in divmod(query, side))
                held = cells[top : top + merge, left : left + merge].max(axis=(0, 1))
                if held.any():
                    logits = objective.next_words[kind](prediction.hidden[row, 0, query])
                    total += F.cross_entropy(logits, torch.from_numpy(held / held.sum())).item()
                    count += 1
        offset += len(words)
        assert count == inputs.counts[f"next_{kind}"] > 0
        assert losses[f"next_{kind}"].item() == pytest.approx(total, rel=1e-4)


def test_losses_of_labels_decrease_to_zero(config: TrainConfig) -> None:
    model = start.build_model(config)
    deferred.materialize(model, torch.device("cpu"))
    deferred.load_shards(model)
    torch.manual_seed(0)
    kept, annealed = StateObjective(model), StateObjective(model, label_steps=10)
    annealed.load_state_dict(kept.state_dict())
    batch = next(iter(loader.batches(config.data, config.model, config.stages["state"], seed=1)))[0]
    labels = {f"next_{kind}" for kind in LABEL_WORDS} | {"named"}

    def losses(objective: StateObjective, step: int) -> dict[str, float]:
        rng = SampleRng([(row,) for row in range(len(batch.episodes))])
        with torch.no_grad():
            inputs = objective.prepare(model, dataclasses.replace(batch, step=step), rng)
            return {name: float(x) for name, x in objective(model, inputs).items()}

    whole, half, none = losses(kept, 5), losses(annealed, 5), losses(annealed, 10)
    assert labels <= whole.keys()
    for name in labels:
        assert half[name] == pytest.approx(whole[name] / 2)
    assert not labels & none.keys()
    for name in ("changed", "unchanged"):
        assert whole[name] == half[name] == none[name]
    with pytest.raises(ConfigError, match="label_steps"):
        StateObjective(model, label_steps=-1)
