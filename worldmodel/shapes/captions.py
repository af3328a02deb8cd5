"""Captions of whole clips, for text to video: what is there at first, and what happens then."""

import numpy as np

from worldmodel.shapes.language import canonical_text, caption, plan_to_text
from worldmodel.shapes.physics import simulate
from worldmodel.shapes.sampling import Sample, sample_plan
from worldmodel.shapes.scene import zone_scene

SPLIT, WRITTEN = "captions", "written"

_SPLIT_ID = 1400
"""Keeps the random streams apart from the other splits'."""


def sample_captioned_clip(seed: int, index: int) -> Sample:
    """Return a clip of one act, whose text determines it.

    Every object is at the centre of a zone at first: "dawn background, a small red ball at the top; the red
    ball moves right".

    Args:
        seed: Seed of the data set.
        index: Index of the clip in the data set.
    """
    rng = np.random.default_rng((_SPLIT_ID, seed, index))
    scene = zone_scene(rng, int(rng.integers(1, 4)))
    plan = sample_plan(rng, scene, "single")
    return Sample(f"{caption(scene)}; {plan_to_text(plan, scene, rng)}", simulate(scene, plan))


def what_happens(sample: Sample) -> str:
    """Say what happens in a clip and what is there after it, in words from which it could be drawn."""
    return f"{canonical_text(sample.clip.plan)}; {caption(sample.clip.after)}"
