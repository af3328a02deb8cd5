"""What the codec keeps, and what the model makes of a description."""

import numpy as np
from jaxtyping import UInt8

from worldmodel.eval.action_following import BATCH, right_throughout, samples_of
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.metrics import Figure, Tally, psnr, ssim
from worldmodel.eval.runner import Subject
from worldmodel.worlds import shapes
from worldmodel.worlds.shapes import judge


def codec(
    subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, Figure]:
    """Encode true clips and decode them: what is lost here, no generator can bring back.

    `last_frame` is strict on the last frame of a clip, `every_frame` in all 8, `image` on the still picture
    before it.
    """
    samples, tally = samples_of("val", seed, num_samples), Tally()
    for start in range(0, len(samples), BATCH):
        clips = [sample.clip for sample in samples[start : start + BATCH]]
        coded = subject.reconstruct(np.stack([clip.frames for clip in clips]))
        stills = subject.reconstruct(np.stack([clip.first_frame[None] for clip in clips]))
        for clip, frames, still in zip(clips, coded, stills, strict=True):
            last = judge(frames[-1], clip.after).strict
            tally.count(
                last_frame=last,
                every_frame=right_throughout(frames, clip),
                image=judge(still[-1], clip.before).strict,
            )
            tally.measure(psnr=psnr(frames, clip.frames), ssim=ssim(frames, clip.frames))
            if album is not None:
                album.add(Example("codec", "encoded and decoded", last, clip.frames, frames))
    return tally.figures()


def text_to_image(
    subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, Figure]:
    """Imagine scenes from their captions, every object at its zone's centre.

    `strict`: all objects are there and right and nothing else; `objects`: one object is right;
    `background`: the backdrop is the one that was named.
    """
    scenes = [shapes.zone_scene(np.random.default_rng((seed, index))) for index in range(num_samples)]
    tally = Tally()
    for start in range(0, num_samples, BATCH):
        batch = scenes[start : start + BATCH]
        texts = [shapes.caption(scene) for scene in batch]
        pictures = subject.imagine(texts, range(seed + start, seed + start + len(batch)))
        for scene, text, picture in zip(batch, texts, pictures, strict=True):
            verdict = judge(picture, scene)
            tally.count(strict=verdict.strict, background=nearest_background(picture) == scene.background)
            for thing in verdict.things:
                tally.count(objects=thing.right)
            if album is not None:
                truth = shapes.render(scene)[None]
                album.add(Example("text to image", text, verdict.strict, truth, picture[None]))
    return tally.figures()


def nearest_background(picture: UInt8[np.ndarray, "h w 3"]) -> str:
    """Return the backdrop that most of the picture looks like; the median looks past the objects."""
    off = {
        name: float(np.median(np.abs(picture.astype(np.float32) - shapes.backdrop(name)).sum(2)))
        for name in shapes.BACKGROUNDS
    }
    return min(off, key=off.__getitem__)
