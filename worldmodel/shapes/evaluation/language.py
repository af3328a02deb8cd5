"""Text about observations: descriptions, answers, and the action between two observations."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from worldmodel import shapes
from worldmodel.episodes import DESCRIBE, WHAT_HAPPENED
from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure, Tally
from worldmodel.eval.runner import Observed, Subject
from worldmodel.shapes import Act, Plan, Sample, Scene, SceneObject
from worldmodel.shapes.evaluation.cases import samples_of, select, single

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
"""Beginnings of questions, the longer ones first, and their names in the report."""


def describe(
    subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, Figure]:
    """Parse the model's descriptions of images and clips.

    `scene`: the background and every object's colour, shape and zone are right, and there are no other
    objects; `scene_image` and `scene_clip`: the same by type of observation; `objects`: one object is right;
    `sizes`: its size is right; `exact`: the whole text is equal.
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
    """Ask questions about images; an answer must be equal to the true one."""
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
    """Parse the model's sentence about the action between an image and the clip after it.

    `acts`: verb, colour and shape of every act are right, in the right stages; `arguments`: also new colours,
    zones and sizes; `exact`: the text equals the canonical one. A push counts as a move, which looks the
    same.
    """
    results: dict[str, dict[str, Figure]] = {}
    for split in INVERSE_SPLITS:
        tally = Tally()
        wanted = _composed if split == "compositions" else single
        samples = select(split, seed, num_samples, wanted)
        observations = [(sample.clip.first_frame[None], sample.clip.frames) for sample in samples]
        texts = _read(subject, observations, [WHAT_HAPPENED] * len(samples))
        for sample, text in zip(samples, texts, strict=True):
            truth = shapes.canonical_text(sample.clip.plan)
            plan, found = shapes.parse(truth), _parsed(text)
            acts = found is not None and _heads(found) == _heads(plan)
            arguments = found is not None and _whole(found) == _whole(plan)
            tally.count(acts=acts, arguments=arguments, exact=text.strip() == truth)
            if album is not None:
                note = f"says: {text}" if acts else f"says: {text} (true: {truth})"
                seen = np.concatenate([sample.clip.first_frame[None], sample.clip.frames])
                album.add(Example("inverse dynamics", "what happened?", acts, seen, None, note))
        results[split] = tally.figures()
    return results


def question_kind(prompt: str) -> str:
    """Return the kind of a question."""
    return next((kind for start, kind in _KINDS.items() if prompt.startswith(start)), "other")


def _read(subject: Subject, observations: Sequence[Observed], prompts: Sequence[str]) -> list[str]:
    """Read in batches."""
    texts: list[str] = []
    for start in range(0, len(prompts), BATCH):
        batch = slice(start, start + BATCH)
        texts += subject.read(observations[batch], prompts[batch])
    return texts


def _seen(sample: Sample, moving: bool) -> tuple[np.ndarray, Scene]:
    """Return frames and the scene that describes them."""
    clip = sample.clip
    return (clip.frames, clip.after) if moving else (clip.first_frame[None], clip.before)


def _count_description(tally: Tally, text: str, scene: Scene, kind: str) -> bool:
    truth = shapes.parse_caption(shapes.caption(scene))
    try:
        found = shapes.parse_caption(text)
    except ValueError:
        found = Scene("")
    matches = {obj.colour: found.find(obj.colour) for obj in truth.objects}
    placed = {
        obj.colour: match is not None and (match.shape, _zone(match)) == (obj.shape, _zone(obj))
        for obj in truth.objects
        for match in [matches[obj.colour]]
    }
    for obj in truth.objects:
        match = matches[obj.colour]
        tally.count(objects=placed[obj.colour], sizes=match is not None and match.size == obj.size)
    right = (
        found.background == truth.background and all(placed.values()) and len(found.objects) == len(placed)
    )
    tally.count(**{"scene": right, f"scene_{kind}": right, "exact": text.strip() == shapes.caption(scene)})
    return right


def _zone(obj: SceneObject) -> str:
    return shapes.zone_of(obj.x, obj.y)


def _composed(sample: Sample) -> bool:
    return len(sample.clip.plan.acts) == 2


def _parsed(text: str) -> Plan | None:
    try:
        return shapes.parse(text)
    except ValueError:
        return None


def _heads(plan: Plan) -> list[Counter[tuple[str | None, ...]]]:
    """Return the verb and the object of every act by stage; the acts of a stage are unordered."""
    return [
        Counter((act.deed, act.target_colour, act.target_shape) for act in stage) for stage in plan.stages
    ]


def _whole(plan: Plan) -> list[Counter[Act]]:
    """Return every act by stage, with pushes as moves."""
    return [
        Counter(Act(a.deed, a.target_colour, a.target_shape) if a.verb == "push" else a for a in s)
        for s in plan.stages
    ]
