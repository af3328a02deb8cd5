"""What the model says: descriptions, answers, and which action it saw."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from worldmodel.eval.action_following import BATCH, chosen, samples_of, single
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.metrics import Figure, Tally
from worldmodel.eval.runner import Shown, Subject
from worldmodel.types import DESCRIBE, WHAT_HAPPENED
from worldmodel.worlds import shapes
from worldmodel.worlds.shapes import Act, Plan, Sample, Scene, Thing

INVERSE_SPLITS = ("val", "held-out", "compositions")

_KINDS = {
    "how many things": "count all",
    "how many": "count a shape",
    "is there": "is there a colour",
    "what colour": "which colour",
    "what shape": "which shape",
    "where": "where",
    "what size": "which size",
}
"""Beginnings of questions, the longer ones first, and what they are called in a report."""


def describe(
    subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, Figure]:
    """Describe pictures and clips, and read the descriptions back.

    `scene`: the background is right, every object is told with its colour, shape and zone, and no other is;
    `scene_image` and `scene_clip` the same for each kind of observation; `objects` and `sizes`: one object's;
    `exact`: the whole text is.
    """
    samples, tally = samples_of("val", seed, num_samples), Tally()
    for kind in ("image", "clip"):
        shown = [_seen(sample, kind == "clip") for sample in samples]
        texts = _read(subject, [(frames,) for frames, _ in shown], [DESCRIBE] * len(shown))
        for (frames, scene), text in zip(shown, texts, strict=True):
            right = _count_description(tally, text, scene, kind)
            if album is not None:
                note = f"says: {text}" if right else f"says: {text} (true: {shapes.caption(scene)})"
                album.add(Example("describe", f"describe this {kind}", right, frames, None, note))
    return tally.figures()


def questions(
    subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, Figure | dict[str, Figure]]:
    """Ask about pictures; an answer is right when it is the exact word."""
    tally, by_kind, asked = Tally(), Tally(), []
    for index, sample in enumerate(samples_of("val", seed, num_samples)):
        asked.append((sample, *shapes.question(sample.clip.before, np.random.default_rng((seed, index)))))
    observations = [(sample.clip.first_frame[None],) for sample, _, _ in asked]
    answers = _read(subject, observations, [prompt for _, prompt, _ in asked])
    for (sample, prompt, truth), said in zip(asked, answers, strict=True):
        right = said.strip() == truth
        tally.count(all=right)
        by_kind.count(**{question_kind(prompt): right})
        if album is not None:
            note = f"says: {said}" if right else f"says: {said} (true: {truth})"
            album.add(Example("questions", prompt, right, sample.clip.first_frame[None], None, note))
    return {**tally.figures(), "by_kind": by_kind.figures()}


def inverse_dynamics(
    subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, dict[str, Figure]]:
    """Say what happened between a picture and the clip after it, and read the sentence back.

    `acts`: every act's verb, colour and shape are right, in the right stages; `arguments`: also its new
    colour, zone and size; `exact`: the whole canonical text is. A push counts as the move it looks like.
    """
    results: dict[str, dict[str, Figure]] = {}
    for split in INVERSE_SPLITS:
        tally = Tally()
        wanted = _composed if split == "compositions" else single
        samples = chosen(split, seed, num_samples, wanted)
        observations = [(sample.clip.first_frame[None], sample.clip.frames) for sample in samples]
        texts = _read(subject, observations, [WHAT_HAPPENED] * len(samples))
        for sample, text in zip(samples, texts, strict=True):
            truth = shapes.canonical_text(sample.clip.plan)
            plan, told = shapes.parse(truth), _parsed(text)
            acts = told is not None and _heads(told) == _heads(plan)
            arguments = told is not None and _whole(told) == _whole(plan)
            tally.count(acts=acts, arguments=arguments, exact=text.strip() == truth)
            if album is not None:
                note = f"says: {text}" if acts else f"says: {text} (true: {truth})"
                seen = np.concatenate([sample.clip.first_frame[None], sample.clip.frames])
                album.add(Example("inverse dynamics", "what happened?", acts, seen, None, note))
        results[split] = tally.figures()
    return results


def question_kind(prompt: str) -> str:
    """Return what a question asks for."""
    return next((kind for start, kind in _KINDS.items() if prompt.startswith(start)), "other")


def _read(subject: Subject, observations: Sequence[Shown], prompts: Sequence[str]) -> list[str]:
    """Read in batches."""
    texts: list[str] = []
    for start in range(0, len(prompts), BATCH):
        batch = slice(start, start + BATCH)
        texts += subject.read(observations[batch], prompts[batch])
    return texts


def _seen(sample: Sample, moving: bool) -> tuple[np.ndarray, Scene]:
    """Return frames, and the scene that their description tells."""
    clip = sample.clip
    return (clip.frames, clip.after) if moving else (clip.first_frame[None], clip.before)


def _count_description(tally: Tally, text: str, scene: Scene, kind: str) -> bool:
    truth = shapes.parse_caption(shapes.caption(scene))
    try:
        told = shapes.parse_caption(text)
    except ValueError:
        told = Scene("")
    matches = {thing.colour: told.find(thing.colour) for thing in truth.things}
    placed = {
        thing.colour: match is not None and (match.shape, _zone(match)) == (thing.shape, _zone(thing))
        for thing in truth.things
        for match in [matches[thing.colour]]
    }
    for thing in truth.things:
        match = matches[thing.colour]
        tally.count(objects=placed[thing.colour], sizes=match is not None and match.size == thing.size)
    right = told.background == truth.background and all(placed.values()) and len(told.things) == len(placed)
    tally.count(**{"scene": right, f"scene_{kind}": right, "exact": text.strip() == shapes.caption(scene)})
    return right


def _zone(thing: Thing) -> str:
    return shapes.zone_of(thing.x, thing.y)


def _composed(sample: Sample) -> bool:
    return len(sample.clip.plan.acts) == 2


def _parsed(text: str) -> Plan | None:
    try:
        return shapes.parse(text)
    except ValueError:
        return None


def _heads(plan: Plan) -> list[Counter[tuple[str | None, ...]]]:
    """Return what is done to which object in every stage; the acts of a stage have no order."""
    return [
        Counter((act.deed, act.target_colour, act.target_shape) for act in stage) for stage in plan.stages
    ]


def _whole(plan: Plan) -> list[Counter[Act]]:
    """Return all that is said of every act, stage by stage, a push as the move that it looks like."""
    return [
        Counter(Act(a.deed, a.target_colour, a.target_shape) if a.verb == "push" else a for a in s)
        for s in plan.stages
    ]
