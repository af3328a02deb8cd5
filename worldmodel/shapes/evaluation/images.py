"""Images generated from captions."""

import numpy as np

from worldmodel import shapes
from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure, Tally
from worldmodel.eval.runner import Subject
from worldmodel.media import Frame


def text_to_image(
    subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, Figure]:
    """Generate scenes from their captions; every object is at the centre of its zone.

    `strict`: all objects are right and there are no others; `objects`: one object is right; `background`: the
    background is the one of the caption.
    """
    scenes = [shapes.zone_scene(np.random.default_rng((seed, index))) for index in range(num_samples)]
    tally = Tally()
    for start in range(0, num_samples, BATCH):
        batch = scenes[start : start + BATCH]
        texts = [shapes.caption(scene) for scene in batch]
        images = subject.imagine(texts, range(seed + start, seed + start + len(batch)))[:, -1]
        for scene, text, image in zip(batch, texts, images, strict=True):
            verdict = shapes.judge(image, scene)
            tally.count(strict=verdict.strict, background=nearest_background(image) == scene.background)
            for obj in verdict.objects:
                tally.count(objects=obj.right)
            if album is not None:
                truth = shapes.render(scene)[None]
                album.add(Example("text to image", text, verdict.strict, truth, image[None]))
    return tally.figures()


def nearest_background(image: Frame) -> str:
    """Return the background nearest to the image; the median of the distances ignores the objects."""
    distances = {
        name: float(np.median(np.abs(image.astype(np.float32) - shapes.backdrop(name)).sum(2)))
        for name in shapes.BACKGROUNDS
    }
    return min(distances, key=distances.__getitem__)
