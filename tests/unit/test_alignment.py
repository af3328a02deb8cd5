"""Vision alignment: features of latent cells and the embeddings of words."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from worldmodel.config import BackboneConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.data import loader
from worldmodel.errors import ConfigError
from worldmodel.models.loading import deferred
from worldmodel.models.loading.location import resolve
from worldmodel.models.vision.adapter import Observation
from worldmodel.shapes import BACKGROUNDS, COLOURS
from worldmodel.shapes.source import LABEL_WORDS
from worldmodel.train import distributed, start
from worldmodel.train.episodes import encode_first_frames
from worldmodel.train.objectives.alignment import AlignmentObjective
from worldmodel.train.objectives.state import StateObjective
from worldmodel.train.trainer import Trainer

STAGE = StageConfig(
    "alignment",
    steps=16,
    batch_size=8,
    tasks={"rounds": 1.0},
    train={"vision": TrainedConfig()},
    lr=1e-2,
    muon_lr=0,
    warmup_steps=5,
    rounds=1,
)


@pytest.fixture
def config(run_config: TrainConfig) -> TrainConfig:
    """A run on the shapes world with a language model that was trained before."""
    backbone = BackboneConfig(pretrained=str(resolve("shapes-tiny") / "backbone"))
    return dataclasses.replace(
        run_config,
        model=dataclasses.replace(run_config.model, backbone=backbone),
        stages={"alignment": STAGE},
    )


def test_features_become_parallel_to_the_words_of_a_pretrained_backbone(config: TrainConfig) -> None:
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, "alignment", mesh, None)
        distances = [
            trainer.step(batches, stop=False).losses["word"]
            for batches in loader.batches(config.data, config.model, STAGE, seed=0)
        ]
    finally:
        distributed.shutdown()
    assert distances[-1] < 0.9 * distances[0]


@torch.no_grad()
def test_the_word_of_an_object_is_its_colour(config: TrainConfig) -> None:
    model = start.build_model(config)
    deferred.materialize(model, torch.device("cpu"))
    deferred.load_shards(model)
    objective = AlignmentObjective(model)
    batch = next(iter(loader.batches(config.data, config.model, STAGE, seed=0)))[0]
    nearest = objective.nearest_words(model, batch)
    names = [word for words in LABEL_WORDS.values() for word in words]
    found = {names[index] for index in nearest.unique().tolist()}
    assert found & set(COLOURS)
    assert found <= {*COLOURS, *BACKGROUNDS}

    latents = encode_first_frames(model, batch)
    cells = model.encode_observation(Observation(latents)).cells
    assert cells is not None
    words = torch.cat([objective.word_embeddings(model, kind) for kind in LABEL_WORDS])
    similar = F.cosine_similarity(cells[:, 0], words[nearest], dim=-1)
    torch.testing.assert_close(objective.alignment(model, latents, batch)["word"], (1 - similar).sum())


def test_a_random_backbone_has_no_words_to_be_near_to(run_config: TrainConfig) -> None:
    assert "word" not in AlignmentObjective(start.build_model(run_config)).weights


def test_a_world_without_labels_is_not_aligned(run_config: TrainConfig) -> None:
    model = dataclasses.replace(run_config.model, world=None)
    config = dataclasses.replace(run_config, model=model, stages={"labels": STAGE})
    mesh = distributed.init(config)
    try:
        batch = next(loader.batches(config.data, config.model, STAGE, seed=0))
        trainer, _ = Trainer.start(config, "labels", mesh, None)
        with pytest.raises(ConfigError, match="labels of a world"):
            trainer.step(batch, stop=False)
    finally:
        distributed.shutdown()
    (within,) = [name for name, _ in StateObjective(trainer.root.model).alignment.named_parameters()]
    assert within == "scale"  # the stage `state` has no such loss
