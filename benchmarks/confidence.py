"""Whether `Session.confidence` tells ordinary sentences from nonsense, and what it costs.

A threshold is chosen on sentences of one seed, and measured on sentences of another.
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np

from worldmodel import shapes
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.evaluation.cases import Truth, judge_frame
from worldmodel.shapes.wordings import sample_worded_rollout

ORDINARY = ("single", "held-out", "compositions")
NONSENSE = ("fantasy", "letters")
NOUNS = ("dragon", "castle", "wizard", "submarine", "piano", "teacher", "volcano", "penguin", "guitar")
VERBS = ("flies over", "sings to", "eats", "paints", "reads about", "marries", "swims around", "dances with")
REQUESTS = (
    "please make a {a} fly over the {b}",
    "the {a} {v} the {b}",
    "put a {a} behind the {b}",
    "i would like to see a {a} on a {b}",
)
Item = tuple[str, str, shapes.Clip]


def sentences(seed: int, count: int) -> Iterator[Item]:
    """Yield kinds, sentences and the clips in whose first frames they are said."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        for kind in (*ORDINARY, "other wordings"):
            worded = kind == "other wordings"
            sample = (
                sample_worded_rollout(seed, index, 1)[0] if worded else shapes.sample_clip(kind, seed, index)
            )
            if sample.clip.plan != shapes.STAY:
                yield kind, sample.text, sample.clip
        sample = shapes.sample_clip("single", seed + 1, index)
        first, second = rng.choice(NOUNS, 2, replace=False)
        request = str(rng.choice(REQUESTS)).format(a=first, b=second, v=rng.choice(VERBS))
        yield "fantasy", request, sample.clip
        yield "letters", letters(rng), sample.clip
        yield "shuffled words", " ".join(rng.permutation(sample.text.split())), sample.clip
        present = {thing.colour for thing in sample.clip.before.objects}
        absent = rng.choice([colour for colour in shapes.COLOURS if colour not in present])
        yield "absent object", f"the {absent} {rng.choice(shapes.SHAPES)} jumps", sample.clip


def letters(rng: np.random.Generator) -> str:
    """Return words of random letters."""
    sizes = rng.integers(2, 9, rng.integers(2, 7))
    return " ".join("".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), size)) for size in sizes)


def measure(model: WorldModel, seed: int, count: int) -> tuple[dict[str, list[tuple[float, bool]]], float]:
    """Return confidences and whether the named object was right, by kind, and the cost of one in rounds."""
    found: dict[str, list[tuple[float, bool]]] = {}
    spent = np.zeros(2)
    for index, (kind, text, clip) in enumerate(sentences(seed, count)):
        session = model.session(seed=index)
        session.reset(clip.first_frame)
        began = time.perf_counter()
        frames = session.step(text).frames
        played = time.perf_counter()
        confidence = session.confidence(text)
        spent += played - began, time.perf_counter() - played
        right = judge_frame(frames[-1], Truth(clip.after, clip.plan)).named
        found.setdefault(kind, []).append((confidence, right))
    return found, spent[1] / spent[0]


def auc(higher: np.ndarray, lower: np.ndarray) -> float:
    """Return the share of pairs in which the first is higher; a constant score has 0.5."""
    difference = higher[:, None] - lower[None]
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=100, help="sentences of each kind")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    model = WorldModel.from_pretrained(args.model)

    def values(found: dict[str, list[tuple[float, bool]]], kinds: tuple[str, ...]) -> np.ndarray:
        return np.array([confidence for kind in kinds for confidence, _ in found[kind]])

    calibration, _ = measure(model, args.seed, args.num_samples)
    ordinary, nonsense = values(calibration, ORDINARY), values(calibration, NONSENSE)
    threshold = float((np.quantile(ordinary, 0.01) + np.quantile(nonsense, 0.99)) / 2)
    found, cost = measure(model, args.seed + 1000, args.num_samples)
    print(f"threshold {threshold:.1f}; a confidence costs {cost:.2f} of a round's time")
    print(f"{'kind':16} {'n':>4}  below threshold  quantiles 5, 50, 95 %    AUC against ordinary")
    ordinary = values(found, ORDINARY)
    for kind, rows in found.items():
        own = np.array([confidence for confidence, _ in rows])
        low, middle, high = np.quantile(own, (0.05, 0.5, 0.95))
        quantiles = f"{low:7.1f} {middle:7.1f} {high:7.1f}"
        below = (own < threshold).mean()
        print(f"{kind:16} {len(own):4}  {below:15.3f}  {quantiles}   {auc(ordinary, own):.3f}")
    rows = [row for kind in (*ORDINARY, "other wordings") for row in found[kind]]
    right, wrong = (np.array([value for value, was in rows if was is is_right]) for is_right in (True, False))
    print(f"named object right {len(right)}, wrong {len(wrong)}: AUC {auc(right, wrong):.3f}")


if __name__ == "__main__":
    main()
