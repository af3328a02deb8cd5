"""A procedural world of shapes: scenes, physics, sentences, and a judge of pixels."""

from worldmodel.worlds.shapes.judge import Verdict, find_objects, judge
from worldmodel.worlds.shapes.language import (
    canonical_text,
    caption,
    parse,
    parse_caption,
    question,
)
from worldmodel.worlds.shapes.physics import (
    DIRECTIONS,
    FRAMES_PER_CLIP,
    STAY,
    Act,
    Plan,
    simulate,
)
from worldmodel.worlds.shapes.render import backdrop, render
from worldmodel.worlds.shapes.sampling import (
    SPLITS,
    Sample,
    documents,
    sample_clip,
    sample_plan,
    sample_rollout,
)
from worldmodel.worlds.shapes.scene import (
    BACKGROUNDS,
    COLOURS,
    FRAME_SIZE,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    place_in_zone,
    random_scene,
    zone_of,
    zone_scene,
)

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "DIRECTIONS",
    "FRAMES_PER_CLIP",
    "FRAME_SIZE",
    "SHAPES",
    "SIZES",
    "SPLITS",
    "STAY",
    "Act",
    "Plan",
    "Sample",
    "Scene",
    "SceneObject",
    "Verdict",
    "backdrop",
    "canonical_text",
    "caption",
    "documents",
    "find_objects",
    "judge",
    "parse",
    "parse_caption",
    "place_in_zone",
    "question",
    "random_scene",
    "render",
    "sample_clip",
    "sample_plan",
    "sample_rollout",
    "simulate",
    "zone_of",
    "zone_scene",
]
