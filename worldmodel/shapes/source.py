"""Training episodes of the shapes world, generated when they are requested and never stored."""

import math
from collections.abc import Collection
from itertools import islice

import numpy as np

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.actions.words import say
from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.episodes import DESCRIBE, WHAT_HAPPENED, Episode
from worldmodel.errors import ConfigError
from worldmodel.shapes.captions import SPLIT as CAPTIONS
from worldmodel.shapes.captions import WRITTEN, sample_captioned_clip, what_happens
from worldmodel.shapes.chance import sample_chance_rollout
from worldmodel.shapes.controls import (
    AWAY,
    KEY_DEEDS,
    action_of,
    sample_away_rollout,
    sample_controls_rollout,
    seen_action,
)
from worldmodel.shapes.controls import SPLIT as CONTROLS
from worldmodel.shapes.films import SPLIT as FILMS
from worldmodel.shapes.films import sample_film_rollout
from worldmodel.shapes.memory import SPLIT as MEMORY
from worldmodel.shapes.memory import sample_memory_rollout
from worldmodel.shapes.recall import SPLIT as RECALL
from worldmodel.shapes.recall import sample_recall
from worldmodel.shapes.scene import half_side_of
from worldmodel.shapes.wordings import SPLIT as WORDINGS
from worldmodel.shapes.wordings import sample_worded_rollout

KEYS = (*shapes.COLOURS, *KEY_DEEDS)
"""Keys of the shapes world; a colour and a verb pressed together act on the object of that colour."""

LABEL_WORDS = {
    "colour": shapes.COLOURS,
    "shape": shapes.SHAPES,
    "size": shapes.SIZES,
    "background": shapes.BACKGROUNDS,
}
"""Words that can hold on a latent cell, by kind, in the order of the label's last axis."""
_WORDS = tuple(word for words in LABEL_WORDS.values() for word in words)


def open_source(name: str, config: DataConfig, model: WorldModelConfig) -> "ShapesSource":
    """Open one of `data.sources` of the kind `shapes`.

    Raises:
        ConfigError: The model has other frames or rounds than the world.
    """
    if model.codec.image_size != shapes.FRAME_SIZE:
        raise ConfigError(
            f"data.sources.{name} is the shapes world, whose frames have {shapes.FRAME_SIZE} pixels a "
            f"side; set model.codec.image_size, now {model.codec.image_size}, to {shapes.FRAME_SIZE}."
        )
    if model.chunk_frames != shapes.FRAMES_PER_CLIP:
        raise ConfigError(
            f"data.sources.{name} is the shapes world, whose rounds have {shapes.FRAMES_PER_CLIP} "
            f"frames; set model.chunk_frames, now {model.chunk_frames}, to {shapes.FRAMES_PER_CLIP}."
        )
    if config.sources[name].split == RECALL and not model.text_history:
        raise ConfigError(
            f"data.sources.{name} asks about earlier rounds, which this model's texts do not read; set "
            "model.text_history to true."
        )
    return ShapesSource(config.sources[name].split, model.action.keys, model.codec.spatial_factor)


class ShapesSource:
    """An endless source of episodes.

    Tasks: `rounds` (actions and the clips they lead to), `imagine` (a caption and the scene it describes),
    `describe` and `ask` (text about one image or clip), `inverse` (the action between two observations),
    `document` (text alone).
    """

    tasks: tuple[str, ...] = ("rounds", "imagine", "describe", "ask", "inverse", "document")
    texts = ()  # they come from the world: `ShapesWorld.documents`
    size = None
    streams = 0

    def __init__(self, split: str = "train", keys: Collection[str] | None = None, cell: int = 8) -> None:
        """Open a split.

        Args:
            split: One of `shapes.SPLITS` (every other of `arrivals` in words beyond the grammar), `chance`
                for acts with several outcomes, `wordings` for single acts in words beyond the grammar,
                `memory` for objects that are hidden and shown again, `controls` for what a mouse, a vector
                and a camera do, `away` for objects that the camera leaves and comes back to, `films` for
                episodes that begin with observed rounds, `captions`, where `imagine` has clips in which
                something happens, `written`: of acts in many words, `ask` has the words and what happens
                then, written out, and `rounds` has these as actions, or `recall`, where `ask` has rounds
                and a question that only these can answer.
            keys: Keys that the model takes; actions that need another key are given as text. None: all keys.
            cell: Pixels along each side of the model's latent cells, on which the labels are.
        """
        splits = (
            *shapes.SPLITS,
            "chance",
            WORDINGS,
            MEMORY,
            CONTROLS,
            AWAY,
            FILMS,
            CAPTIONS,
            WRITTEN,
            RECALL,
        )
        if split not in splits:
            raise ConfigError(f"The shapes world has no split {split!r}; use {', '.join(splits)}.")
        self.name = self.split = split
        if split == RECALL:
            self.tasks = ("ask",)
        self.keys, self.cell = keys, cell

    def at(self, index: int) -> "ShapesSource":
        """Return itself: an episode depends on the index alone."""
        return self

    def cost(self, index: int, rounds: int) -> float:
        """Return the number of rounds, the same for every index."""
        return rounds

    def close(self) -> None:
        """Do nothing; no files are open."""

    def episode(self, task: str, seed: int, index: int, rounds: int = 1) -> Episode:
        """Return one episode; see the class for the tasks."""
        rng = np.random.default_rng((seed, index, 7))
        name = f"{self.split}/{task}/{seed}/{index}"
        if task == "document":
            return Episode(name, answer=next(islice(shapes.documents(rng), index % 4, None)))
        if task == "imagine" and self.split == CAPTIONS:
            told = sample_captioned_clip(seed, index)
            return Episode(name, (told.clip.frames[:0], told.clip.frames), (Action(told.text),))
        if task == "imagine":
            scene = shapes.zone_scene(rng) if rng.random() < 0.8 else shapes.random_scene(rng)
            clip = np.repeat(shapes.render(scene)[None], shapes.FRAMES_PER_CLIP, axis=0)
            return Episode(name, (clip[:0], clip), (Action(shapes.caption(scene)),))
        if self.split == RECALL:
            return self._recall(name, seed, index, 1 + index % max(rounds, 1), rng)
        observed = 0
        if self.split == "chance":
            samples = sample_chance_rollout(seed, index, max(rounds, 1))
        elif self.split == CAPTIONS:
            samples = [sample_captioned_clip(seed, index)]
        elif self.split == WORDINGS or (self.split == WRITTEN and index % 2):
            samples = sample_worded_rollout(seed, index, max(rounds, 1))
        elif self.split == "arrivals" and index % 2:
            samples = sample_worded_rollout(seed, index, max(rounds, 1), self.split)
        elif self.split == MEMORY:
            samples = sample_memory_rollout(seed, index, max(rounds, 1))
        elif self.split == CONTROLS:
            samples = sample_controls_rollout(seed, index, max(rounds, 1))
        elif self.split == AWAY:
            samples = sample_away_rollout(seed, index, max(rounds, 2))[: max(rounds, 1)]
        elif self.split == FILMS:
            samples, observed = sample_film_rollout(seed, index, max(rounds, 1))
        else:
            split = "single" if self.split == WRITTEN else self.split
            samples = shapes.sample_rollout(split, seed, index, max(rounds, 1))
        first = samples[0]
        before = shapes.render(first.clip.before)[None]
        if task == "inverse":
            answer = say(seen_action(first.clip))
            return Episode(name, (before, first.clip.frames), prompt=WHAT_HAPPENED, answer=answer)
        if task == "ask" and self.split == WRITTEN:
            return Episode(name, (before,), prompt=first.text, answer=what_happens(first))
        if task in ("describe", "ask"):
            filmed = first.clip.controls.camera is not None  # captions are of scenes that are seen whole
            scene = first.clip.before if rng.random() < 0.5 or filmed else first.clip.after
            frames = before if scene is first.clip.before else first.clip.frames
            if task == "describe":
                return Episode(name, (frames,), prompt=DESCRIBE, answer=shapes.caption(scene))
            prompt, answer = shapes.question(scene, rng)
            return Episode(name, (frames,), prompt=prompt, answer=answer)
        if task != "rounds":
            raise ValueError(f"The shapes world has no task {task!r}; use one of {', '.join(self.tasks)}.")
        if self.split == WRITTEN:
            actions = tuple(Action(what_happens(sample)) for sample in samples)
        else:
            actions = tuple(_action(sample, rng, self.keys) for sample in samples)
        clips = tuple(sample.clip.frames for sample in samples)
        labels = _labels(first, self.cell)
        if observed:
            labels = {"words": labels["words"]}  # no act is named in a film, and none is predicted
        return Episode(name, (before, *clips), actions, labels=labels, observed=observed)

    def _recall(self, name: str, seed: int, index: int, rounds: int, rng: np.random.Generator) -> Episode:
        asked = sample_recall(seed, index, rounds)
        clips = [sample.clip for sample in asked.samples]
        observations = (clips[0].first_frame[None], *(clip.frames for clip in clips))
        # In a film nothing is done, and in the other rounds what is in the text.
        actions = tuple(
            _action(sample, rng, self.keys) if number >= asked.observed else Action()
            for number, sample in enumerate(asked.samples)
        )
        return Episode(name, observations, actions, asked.prompt, asked.answer, observed=asked.observed)


def _action(sample: shapes.Sample, rng: np.random.Generator, known: Collection[str] | None) -> Action:
    """Return the action as text; one in ten of those that keys can express, as keys."""
    if sample.keys or sample.clip.controls != shapes.NO_CONTROLS:
        return action_of(sample)
    if not sample.text:
        return Action()
    acts = [act for stage in sample.clip.plan.stages for act in stage]
    if len(acts) == 1 and rng.random() < 0.1:
        act = acts[0]
        if act.verb == "stay":
            return Action()
        pressed = {act.target_colour, act.deed}
        if act.deed in KEYS and act.target_colour and (known is None or pressed <= set(known)):
            return Action(keys=(act.target_colour, act.deed))
    return Action(sample.text)


def _labels(sample: shapes.Sample, cell: int) -> dict[str, np.ndarray]:
    """Return the labels of the first round on cells of so many pixels; see `World.label_words`."""
    side = shapes.FRAME_SIZE // cell
    before, after = sample.clip.before, sample.clip.after
    targets = {act.target_colour for stage in sample.clip.plan.stages for act in stage}
    targets |= _controlled(sample.clip)
    named = np.zeros((side, side), dtype=np.float32)
    for obj in shapes.as_seen(before).objects:
        if obj.colour in targets:
            named[_covered(obj, cell)] = 1
    words, next_words = _words_on_cells(before, cell), _words_on_cells(after, cell)
    next_words[(words == next_words).all(axis=-1)] = 0
    return {"words": words, "next_words": next_words, "named": named}


def _controlled(clip: shapes.Clip) -> set[str]:
    """Return the colours of the objects that a pointer or a push moved."""
    if clip.controls.drag is None and clip.controls.push is None:
        return set()
    still = shapes.simulate(clip.before, clip.plan, shapes.Controls(camera=clip.controls.camera)).after
    return {obj.colour for obj in clip.after.objects if still.find(obj.colour) != obj}


def _words_on_cells(scene: shapes.Scene, cell: int) -> np.ndarray:
    """Return which words hold on each latent cell, `[rows, columns, words]`."""
    side = shapes.FRAME_SIZE // cell
    words = np.zeros((side, side, len(_WORDS)), dtype=np.float32)
    words[..., _WORDS.index(scene.background)] = 1
    for obj in shapes.as_seen(scene).objects:
        for word in (obj.colour, obj.shape, obj.size):
            words[(*_covered(obj, cell), _WORDS.index(word))] = 1
    return words


def _covered(obj: shapes.SceneObject, cell: int) -> tuple[slice, slice]:
    """Return the rows and columns of the latent cells whose centre an object covers."""
    half = half_side_of(obj)
    return _between(obj.y, half, cell), _between(obj.x, half, cell)


def _between(middle: int, half: float, cell: int) -> slice:
    """Return the latent cells along one axis whose centre is at most `half` pixels from the middle."""
    centre = (cell - 1) / 2  # of the first cell
    first = math.ceil((middle - half - centre) / cell)
    last = math.floor((middle + half - centre) / cell)
    return slice(max(first, 0), max(last + 1, 0))
