"""Goals in words against goal pictures: plans of one act in the shapes world, judged by its simulator.

Scenes have two objects and eight acts to choose from, of which two bring the colour that is asked for. The
same search looks for the highest probability that the answer to "is there a COLOUR thing" is yes, or for the
picture that the first of the two acts leads to; random acts stand beside them.

    python benchmarks/goals.py --num-samples 60
"""

import argparse
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.eval.figures import rate_figure
from worldmodel.models.world_model import WorldModel
from worldmodel.planning import Choices, GoalImage, ModelSimulator, Objective, PlanSettings, Reached, plan
from worldmodel.shapes import Scene

SEARCH = PlanSettings("search", horizon=1)


def planned(
    model: WorldModel, scene: Scene, objective: Objective, texts: Sequence[str], goal: str | None
) -> str:
    """Return the act that a search chooses."""
    simulator = ModelSimulator(model, goal=goal)
    start = simulator.start(shapes.render(scene))
    found = plan(simulator, start, objective, Choices(tuple(map(Action, texts))), SEARCH)
    return found.trajectory.actions[0].text or ""


def after(scene: Scene, text: str) -> Scene:
    """Return the scene after an act."""
    return shapes.simulate(scene, shapes.parse(text)).after


def main() -> None:
    """Plan in random scenes and print how often the colour is there afterwards."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    model = WorldModel.from_pretrained(args.model)
    right = {"words": 0, "picture": 0, "random act": 0}
    for index in tqdm(range(args.num_samples), disable=None, leave=False):
        rng = np.random.default_rng(args.seed + index)
        scene = shapes.random_scene(rng, 2)
        free = [colour for colour in shapes.COLOURS if scene.find(colour) is None]
        wanted, other = rng.permutation(free)[:2].tolist()
        ends = (f"turns {wanted}", f"turns {other}", "moves left", "jumps")
        texts = [f"the {obj.colour} {obj.shape} {end}" for obj in scene.objects for end in ends]
        picture = GoalImage(shapes.render(after(scene, texts[0])), shapes.FRAME_SIZE)
        chosen = {
            "words": planned(model, scene, Reached(), texts, f"is there a {wanted} thing"),
            "picture": planned(model, scene, picture, texts, None),
            "random act": texts[int(rng.integers(len(texts)))],
        }
        for name, text in chosen.items():
            right[name] += after(scene, text).find(wanted) is not None
    for name, count in right.items():
        figure = rate_figure(count, args.num_samples)
        low, high = (f"{100 * figure[end]:.0f}" for end in ("low", "high"))
        print(f"{name:12s} {count} of {args.num_samples} ({low} to {high} %)")


if __name__ == "__main__":
    main()
