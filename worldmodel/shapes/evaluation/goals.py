"""Goals of models of the shapes world."""

from worldmodel.eval.goals import Goal
from worldmodel.eval.table import Path
from worldmodel.eval.uncertainty import SEEDS
from worldmodel.eval.uncertainty import STEPS as UNCERTAIN_STEPS
from worldmodel.shapes.controls import KINDS as CONTROLS
from worldmodel.shapes.evaluation.controls import AWAY_ROUNDS
from worldmodel.shapes.evaluation.films import FILM_ROUNDS
from worldmodel.shapes.evaluation.memory import HIDDEN_ROUNDS
from worldmodel.shapes.evaluation.recall import RECALL_ROUNDS
from worldmodel.shapes.recall import KINDS as QUESTIONS

_SEEN = ("action_following", "val")
_HELD_OUT = ("action_following", "held-out")
_COMPOSED = ("action_following", "compositions")
_WORDINGS = ("action_following", "paraphrases", "by_kind")


def _beside(path: Path, name: str) -> dict[str, Path]:
    """Return the baselines of a rate: the forecast without the generator, and a copy of the first frame."""
    return {"0 steps": (*path, f"forecast_{name}"), "copy": (*path, f"copy_{name}")}


def _control(kind: str, name: str, at_least: float | None = None) -> Goal:
    right = {
        "moved": "what moved is right, within 3 pixels",
        "pixel": "every object is right, within a pixel",
        "strict": "the whole last frame is right",
    }
    path = ("controls", kind)
    baselines = {"copy": (*path, f"copy_{name}")}
    return Goal(f"Controls, {kind}: {right[name]}", (*path, name), at_least=at_least, baselines=baselines)


def _right(title: str, path: Path, name: str, at_least: float | None = None) -> Goal:
    return Goal(title, (*path, name), at_least=at_least, baselines=_beside(path, name))


GOALS: tuple[Goal, ...] = (
    Goal("Codec alone: every object of a clip's last frame survives", ("codec", "last_frame"), at_least=0.98),
    _right("Seen combinations: the named object is right", _SEEN, "named"),
    _right("Seen combinations: the whole last frame is right", _SEEN, "strict"),
    _right("Held-out combinations: the named object is right", _HELD_OUT, "named", 0.97),
    _right("Held-out combinations: the whole last frame is right", _HELD_OUT, "strict", 0.92),
    Goal("Held-out combinations: every one of the 8 frames is right", (*_HELD_OUT, "every_frame")),
    Goal("Held-out combinations: PSNR", (*_HELD_OUT, "psnr"), "dB", at_least=29.0),
    _right("Two acts in one sentence: the whole last frame is right", _COMPOSED, "strict", 0.88),
    _right(
        "Paraphrases in words of the grammar: the named object is right",
        (*_WORDINGS, "known words"),
        "named",
        0.80,
    ),
    _right(
        "Paraphrases with unseen nouns and colours: the named object is right",
        (*_WORDINGS, "unseen words"),
        "named",
        0.60,
    ),
    _right(
        "Paraphrases in other languages: the named object is right", (*_WORDINGS, "other languages"), "named"
    ),
    _right("Sentences that ask for nothing: nothing changes", (*_WORDINGS, "nothing"), "strict", 0.95),
    Goal("Control: the named object is right under another clip's text", ("control", "named"), at_most=0.05),
    *(
        Goal(
            f"Rollout, one act a round, round {number}: the whole last frame is right",
            ("rollouts", "strict", number - 1),
            at_least=goal,
            baselines={"0 steps": ("rollouts", "forecast_strict", number - 1)},
        )
        for number, goal in ((1, 0.92), (5, 0.80), (10, 0.75))
    ),
    Goal("Text to image: every object is right", ("text_to_image", "strict"), at_least=0.85),
    Goal("Text to video: the whole first frame is right", ("text_to_video", "first")),
    Goal(
        "Text to video: the object that acts is right at the end",
        ("text_to_video", "named"),
        baselines={"still clip": ("text_to_video", "still_named")},
    ),
    Goal("Describe: every object's colour, shape and zone are right", ("describe", "scene"), at_least=0.90),
    Goal("Questions: the answer is exact", ("questions", "all")),
    Goal(
        "Inverse dynamics: verb and object of a single act are right",
        ("inverse", "val", "acts"),
        at_least=0.90,
    ),
    Goal("Inverse dynamics: held-out combinations", ("inverse", "held-out", "acts")),
    Goal("Inverse dynamics: two acts", ("inverse", "compositions", "acts")),
    Goal("No action: nothing changes", ("null_action", "none"), at_least=0.97),
    Goal("Keys instead of words: the named object is right", ("keys", "named")),
    *(
        Goal(
            f"Uncertain futures, {steps} denoising steps: every frame shows one possible outcome",
            ("chance", f"{steps} steps", "valid"),
            at_least=0.90 if steps else 0.85,
            baselines={"copy": ("chance", "baselines", "copy_last_frame")},
        )
        for steps in UNCERTAIN_STEPS
    ),
    *(
        Goal(
            f"Uncertain futures, {steps} denoising steps: total variation over {SEEDS} seeds",
            ("chance", f"{steps} steps", "total_variation"),
            "",
            at_most=0.15 if steps else 0.18,
            baselines={"exact draws": ("chance", "baselines", "sampling_noise")},
        )
        for steps in UNCERTAIN_STEPS
    ),
    *(
        Goal(
            f"Memory: a hidden object comes back right; rounds hidden: {hidden}",
            ("memory", f"rounds hidden: {hidden}", "named"),
            at_least=goal,
            baselines={"forgotten": ("memory", f"rounds hidden: {hidden}", "forgotten_named")},
        )
        for hidden, goal in zip(HIDDEN_ROUNDS, (0.95, 0.90, 0.80), strict=True)
    ),
    *(
        Goal(
            f"Memory: the whole frame is right; rounds hidden: {hidden}",
            ("memory", f"rounds hidden: {hidden}", "strict"),
        )
        for hidden in HIDDEN_ROUNDS
    ),
    *(
        Goal(
            f"Films: an object that moved keeps moving; rounds of the film: {rounds}",
            ("films", f"rounds of film: {rounds}", "named"),
            at_least=0.90,
            baselines={"last frame alone": ("films", f"rounds of film: {rounds}", "image_named")},
        )
        for rounds in FILM_ROUNDS
    ),
    *(
        Goal(
            f"Films: both films of a pair are right; rounds of the film: {rounds}",
            ("films", f"rounds of film: {rounds}", "pairs"),
        )
        for rounds in FILM_ROUNDS
    ),
    _control("drag", "moved", 0.92),
    _control("push one", "moved"),
    _control("push all", "moved"),
    _control("pan", "pixel", 0.95),
    _control("zoom", "pixel", 0.95),
    *(_control(kind, "strict") for kind in CONTROLS),
    *(
        Goal(
            f"Inverse dynamics of controls, {kind}: the action is right, ways within 3 pixels",
            ("inverse_controls", kind, "right"),
            baselines={"nothing happens": ("inverse_controls", kind, "copy_right")},
        )
        for kind in CONTROLS
    ),
    *(
        Goal(
            f"Camera: objects that it left are as they were when it comes back; rounds away: {away}",
            ("away", f"rounds away: {away}", "named"),
            at_least=goal,
            baselines={"forgotten": ("away", f"rounds away: {away}", "forgotten_named")},
        )
        for away, goal in zip(AWAY_ROUNDS, (0.95, 0.90, 0.85), strict=True)
    ),
    *(
        Goal(
            f"Questions about earlier rounds, {kind}, {rounds} rounds: the answer is right",
            ("recall", f"{kind}, {rounds} rounds", "right"),
            baselines={"newest observation alone": ("recall", f"{kind}, {rounds} rounds", "alone")},
        )
        for kind in QUESTIONS
        for rounds in RECALL_ROUNDS
    ),
    Goal("Speed of one session", ("speed", "fps"), "fps", at_least=100.0),
    Goal("Action to first frame", ("speed", "first_frame"), "s", at_most=0.150),
    Goal("Cost of round 50 against round 2", ("speed", "late_to_early"), "x", at_most=1.1),
)
