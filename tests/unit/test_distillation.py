"""Distillation: fewer denoising steps do what the teacher's many did."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.batch import take
from worldmodel.config import (
    ActionConfig,
    ConditionAdapterConfig,
    DataConfig,
    GeneratorConfig,
    SourceConfig,
    StageConfig,
    StateConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
)
from worldmodel.data.loader import Batch
from worldmodel.diffusion.sampler import Chunk
from worldmodel.errors import ConfigError
from worldmodel.experiments import distillation
from worldmodel.experiments.distillation import DistillationObjective, ImleObjective
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.source import ShapesSource
from worldmodel.train import distributed, finetune
from worldmodel.train.checkpoint import checkpointer
from worldmodel.train.objectives.base import Objective, SampleRng
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.trainer import Trainer

DISTILL = "worldmodel.experiments.distillation:DistillationObjective"
STAGE = StageConfig(
    DISTILL,
    {"teacher_steps": 8},
    tasks={"rounds": 1.0},
    train={"generator": TrainedConfig()},
    rounds=1,
    steps=60,
    batch_size=8,
    warmup_steps=5,
    muon_lr=0.005,
)


@pytest.fixture
def config(make_model: Callable[..., WorldModel], tmp_path: Path) -> TrainConfig:
    """A run that distils a model of random weights, whose generator needs several steps."""
    teacher = make_model(
        seed=3,
        image_size=64,
        world="shapes",
        num_inference_steps=1,
        action=ActionConfig(text={"max_tokens": 160}),
    )
    folder = teacher.save_pretrained(tmp_path / "teacher", dtype=torch.float32)
    return TrainConfig(
        model=teacher.config,
        init_from=str(folder),
        stages={"distill": STAGE},
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        run_dir=str(tmp_path / "run"),
        validation=ValidationConfig(codec_frames=16),
        precision="fp32",
    )


def made(model: WorldModel, num_inference_steps: int) -> Tensor:
    """Return the clips that a model makes of the same start and noises."""
    clips = []
    for seed in range(8):
        session = model.session(seed, num_inference_steps)
        session.reset(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8))
        clips.append(torch.from_numpy(session.step(Action("the red ball moves left")).frames).double())
    return torch.stack(clips)


@pytest.mark.slow
def test_one_step_comes_near_to_the_steps_of_the_teacher(config: TrainConfig) -> None:
    teacher = WorldModel.from_pretrained(str(config.init_from))
    student = WorldModel.from_pretrained(finetune.train(config))
    truth = made(teacher, STAGE.objective_args["teacher_steps"])
    before, after = ((made(each, 1) - truth).abs().mean() for each in (teacher, student))
    assert after < before / 2
    frozen = {name for name in teacher.state_dict() if not name.startswith("generator.")}
    own = student.state_dict()
    rounded = torch.bfloat16  # in which runs write their model
    assert all(
        torch.equal(own[name].to(rounded), x.to(rounded))
        for name, x in teacher.state_dict().items()
        if name in frozen and x.is_floating_point()
    )


@pytest.mark.slow
def test_a_resumed_run_learns_from_the_same_teacher(config: TrainConfig, tmp_path: Path) -> None:
    stage = dataclasses.replace(
        STAGE, steps=4, batch_size=2, ema_decay=0.5, self_rollout=(1.0, 1.0), rounds=2
    )
    runs = []
    for name, stops in (("straight", []), ("resumed", [False, True])):
        answers = iter(stops)
        run = dataclasses.replace(config, stages={"distill": stage}, run_dir=str(tmp_path / name))
        finetune.train(run, stop=lambda answers=answers: next(answers, False))
        if stops:
            assert checkpointer.load(checkpointer.latest(tmp_path / name), {})["step"] == 2  # type: ignore
            finetune.train(run)
        newest = checkpointer.latest(tmp_path / name)
        assert newest is not None and not any(
            "teacher" in key for key in load_file(next(newest.glob("*.safetensors")))
        )
        runs.append(load_file(tmp_path / name / "model" / "generator" / "model.safetensors"))
    assert all(torch.equal(x, runs[1][name]) for name, x in runs[0].items())


def test_a_second_round_begins_where_the_first_one_of_the_student_ended(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the teacher as well as for the student, whose weights are others by then."""
    episodes = [ShapesSource(keys=()).episode("rounds", 0, index, rounds=2) for index in range(2)]
    contexts: list[Tensor] = []
    predict = distillation.predict_windows

    def watched(model: WorldModel, context: Tensor, *rest: Any) -> Any:
        contexts.append(context)
        return predict(model, context, *rest)

    monkeypatch.setattr(distillation, "predict_windows", watched)
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, "distill", mesh, None)
        model, seen = trainer.root.model, {}
        with torch.no_grad():
            model.generator.project.weight.mul_(-2)  # type: ignore[operator, union-attr]
        for self_rollout in (False, True):
            batch = Batch(step=0, task="rounds", indices=(0, 1), episodes=episodes, self_rollout=self_rollout)
            trainer.evaluate([batch])
            of_teacher, of_student = contexts
            assert torch.equal(of_teacher, of_student)
            contexts.clear()
            # Another objective, by the student's weights alone.
            joint: Any = OBJECTIVES["joint"](model)
            rng = SampleRng([(config.seed, index) for index in batch.indices])
            played, _ = trainer.without_gradients(
                lambda joint=joint, batch=batch, rng=rng: joint.observed(
                    model, joint.prepare(model, batch, rng)
                )
            )
            torch.testing.assert_close(of_student, played)
            seen[self_rollout] = of_student
    finally:
        distributed.shutdown()
    assert torch.equal(seen[False][:, 0], seen[True][:, 0])
    assert not torch.allclose(seen[False][:, 1], seen[True][:, 1])


@pytest.mark.parametrize("kind", [DistillationObjective, ImleObjective])
def test_every_step_aims_at_the_target_from_the_level_at_which_it_begins(
    make_model: Callable[..., WorldModel], monkeypatch: pytest.MonkeyPatch, kind: type[Objective]
) -> None:
    """From the straight path by distillation, from where the sampler is then by IMLE."""
    model = make_model(
        num_inference_steps=3,
        condition_adapter=ConditionAdapterConfig(forecast="none"),
        image_size=64,
        action=ActionConfig(text={"max_tokens": 160}),
    )
    episodes = [ShapesSource(keys=()).episode("rounds", 0, index) for index in range(2)]
    batch = Batch(step=0, task="rounds", indices=(0, 1), episodes=episodes, self_rollout=False)
    objective: Any = kind(model)
    seen: list[tuple[Tensor, Tensor]] = []
    velocity = model.generator.velocity

    def watched(latents: Tensor, sigma: Tensor, *rest: Any, **settings: Any) -> Any:
        predicted, cache = velocity(latents, sigma, *rest, **settings)
        if sigma[:, -1].any():  # context frames have no noise
            count = model.config.latent_shape[0]
            seen.append((latents[:, -count:], predicted[:, -count:]))
        return predicted, cache

    monkeypatch.setattr(model.generator, "velocity", watched)
    with torch.no_grad():
        inputs = objective.prepare(model, batch, SampleRng([(0,), (1,)]))
        rounds, actions = inputs.content, [list(episode.actions) for episode in episodes]
        condition = distillation.predict_windows(model, rounds.context, actions, rounds.frames).condition
        context, target = rounds.context.flatten(0, 1), rounds.target.flatten(0, 1)
        noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
        losses = objective.step_losses(model, rounds, noise, condition, context, inputs.rng)
        learned, solver = list(seen), model.generator.solver(3)
        seen.clear()
        model.denoise([Chunk(noise, solver, (condition,), context)])
    assert len(learned) == len(seen) == 3
    errors = []
    for (start, predicted), (sampled, _), step in zip(learned, seen, range(3), strict=True):
        sigma = solver.timestep(step)
        straight = (1 - sigma) * target + sigma * noise
        torch.testing.assert_close(
            start, straight if kind is DistillationObjective else sampled, atol=1e-4, rtol=1e-4
        )
        assert step == 0 or not torch.allclose(straight, sampled, atol=1e-2)
        aim = (start - target) / sigma  # the velocity that leads from there to the target
        errors.append((predicted - aim).pow(2).mean(dim=2))
    weight = objective.cell_weights(rounds).flatten(0, 1)
    expected = torch.stack([(weight * error).sum() for error in errors]).mean()
    torch.testing.assert_close(losses["flow"].double(), expected.double(), atol=1e-4, rtol=1e-4)


def test_the_noise_with_the_nearest_sample_is_trained(make_model: Callable[..., WorldModel]) -> None:
    """By samples of the public sampler, one per noise."""
    model = make_model(num_inference_steps=1, image_size=64, action=ActionConfig(text={"max_tokens": 160}))
    episodes = [ShapesSource(keys=()).episode("rounds", 0, index, rounds=2) for index in range(2)]
    batch = Batch(step=0, task="rounds", indices=(0, 1), episodes=episodes, self_rollout=False)
    objective: Any = ImleObjective(model, num_candidates=5)
    drawn: list[Tensor] = []

    class Watched(SampleRng):
        def normal(self, *shape: int) -> Tensor:
            drawn.append(super().normal(*shape))
            return drawn[-1]

    with torch.no_grad():
        inputs = objective.prepare(model, batch, SampleRng([(0,), (1,)]))
        rounds, rng = inputs.content, Watched([(2,), (3,)])
        context, frames = objective.observed(model, inputs)
        actions = [list(episode.actions) for episode in episodes]
        condition = distillation.predict_windows(model, context, actions, frames).condition
        context, target = context.flatten(0, 1), rounds.target.flatten(0, 1)
        chosen = objective.nearest(model, rounds, condition, context, rng)
        noises = torch.stack([noise.flatten(0, 1) for noise in drawn], dim=1)
        assert noises.shape[:2] == (4, 5)
        for row in range(len(target)):
            samples = model.denoise(
                [
                    Chunk(
                        noise[None],
                        model.generator.solver(1),
                        (take(condition, torch.tensor([row])),),
                        context[row, None],
                    )
                    for noise in noises[row]
                ]
            )
            distances = torch.stack([(sample[0] - target[row]).pow(2).mean() for sample in samples])
            assert len(distances.unique()) == 5
            assert torch.equal(chosen[row], noises[row, distances.argmin()])


@pytest.mark.slow
def test_two_futures_are_learned_by_different_noises(make_model: Callable[..., WorldModel]) -> None:
    """Where one state has two futures, one candidate makes their mean, several make either."""
    episode = ShapesSource(keys=()).episode("rounds", 0, 0, rounds=1)
    batch = Batch(step=0, task="rounds", indices=(0,) * 2, episodes=[episode] * 2, self_rollout=False)
    distances = {}
    for candidates in (1, 6):
        model = make_model(
            num_inference_steps=1,
            state=StateConfig(),  # whose features a generator can read
            condition_adapter=ConditionAdapterConfig(forecast="none"),
            image_size=64,
            action=ActionConfig(text={"max_tokens": 160}),
        )
        model.generator.requires_grad_(True)
        objective: Any = ImleObjective(model, num_candidates=candidates)
        objective.context_noise = 0.0  # one state
        optimizer = torch.optim.AdamW(model.generator.parameters(), lr=4e-3)
        shape = model.config.latent_shape
        futures = torch.stack([torch.full(shape, -1.0), torch.full(shape, 1.0)])
        for step in range(120):
            inputs = objective.prepare(model, batch, SampleRng([(step, row) for row in range(2)]))
            target = futures[:, None]
            inputs = dataclasses.replace(inputs, content=dataclasses.replace(inputs.content, target=target))
            optimizer.zero_grad()
            (objective(model, inputs)["flow"] / inputs.counts["flow"]).backward()
            optimizer.step()
        with torch.no_grad():
            inputs = objective.prepare(model, batch, SampleRng([(1000, row) for row in range(2)]))
            prediction = objective.predict(model, inputs)
            rng = SampleRng([(999, row) for row in range(2)])
            samples = []
            for _ in range(8):
                noise, context = rng.normal(*shape), prediction.context.flatten(0, 1)
                chunk = Chunk(noise, model.generator.solver(1), (prediction.condition,), context)
                samples += model.denoise([chunk])
        apart = (torch.cat(samples)[:, None] - futures).abs().flatten(2).mean(dim=2)
        distances[candidates] = apart
    assert distances[1].min() > 0.8  # between the two, which are 2 apart
    assert distances[6].amin(dim=1).median() < 0.4
    assert set(distances[6].argmin(dim=1).tolist()) == {0, 1}


def test_models_without_steps_or_with_overlapping_chunks_or_guidance_are_refused(
    make_model: Callable[..., WorldModel],
) -> None:
    for kind in (DistillationObjective, ImleObjective):
        for settings in (
            {"num_inference_steps": 0},
            {"sampler": "swin", "num_inference_steps": 2},
            {"guidance_scale": 1.5},
        ):
            with pytest.raises(ConfigError, match=r"num_inference_steps|swin|teacher_guidance_scale"):
                kind(make_model(**settings))
    with pytest.raises(ConfigError, match="teacher_steps"):
        DistillationObjective(make_model(num_inference_steps=1), teacher_steps=0)
    with pytest.raises(ConfigError, match="num_candidates"):
        ImleObjective(make_model(num_inference_steps=1), num_candidates=0)


def test_a_teacher_whose_steps_add_noise_is_refused(make_model: Callable[..., WorldModel]) -> None:
    model = make_model(num_inference_steps=2, generator=GeneratorConfig(stochastic_sampling=True))
    with pytest.raises(ConfigError, match="stochastic_sampling"):
        DistillationObjective(model)


def test_guidance_of_a_teacher_that_takes_none_is_refused(make_model: Callable[..., WorldModel]) -> None:
    model = make_model(num_inference_steps=1, generator=GeneratorConfig(condition_dropout=0.0))
    DistillationObjective(model)
    with pytest.raises(ConfigError, match=r"teacher_guidance_scale is 3.*condition_dropout"):
        DistillationObjective(model, teacher_guidance_scale=3.0)


def test_the_teacher_has_the_guidance_of_its_stage(make_model: Callable[..., WorldModel]) -> None:
    """One step is linear in the guidance scale."""
    model = make_model(num_inference_steps=1, image_size=64, action=ActionConfig(text={"max_tokens": 160}))
    episodes = [ShapesSource(keys=()).episode("rounds", 0, index) for index in range(2)]
    batch = Batch(step=0, task="rounds", indices=(0, 1), episodes=episodes, self_rollout=False)

    def taught(scale: float) -> Tensor:
        objective = DistillationObjective(model, teacher_steps=1, teacher_guidance_scale=scale)
        with torch.no_grad():
            inputs = objective.prepare(model, batch, SampleRng([(0,), (1,)]))
            return objective.teach(model, inputs).content.target

    once, twice, thrice = (taught(scale) for scale in (1.0, 2.0, 3.0))
    assert not torch.allclose(once, twice)
    torch.testing.assert_close(thrice, 2 * twice - once, atol=1e-4, rtol=1e-4)
