"""Goals of models of the shapes world."""

from worldmodel.eval.goals import Goal
from worldmodel.eval.uncertainty import SEEDS
from worldmodel.eval.uncertainty import STEPS as UNCERTAIN_STEPS
from worldmodel.worlds.shapes.evaluation.films import FILM_ROUNDS
from worldmodel.worlds.shapes.evaluation.memory import HIDDEN_ROUNDS

_HELD_OUT = ("action_following", "held-out")
_COMPOSED = ("action_following", "compositions")
_WORDINGS = ("action_following", "paraphrases", "by_kind")

GOALS: tuple[Goal, ...] = (
    Goal("Codec alone: every object of a clip's last frame survives", ("codec", "last_frame"), at_least=0.98),
    Goal("Seen combinations: the named object is right", ("action_following", "val", "named")),
    Goal("Seen combinations: the whole last frame is right", ("action_following", "val", "strict")),
    Goal("Held-out combinations: the named object is right", (*_HELD_OUT, "named"), at_least=0.97),
    Goal("Held-out combinations: the whole last frame is right", (*_HELD_OUT, "strict"), at_least=0.92),
    Goal("Held-out combinations: the same with 0 denoising steps", (*_HELD_OUT, "forecast_strict")),
    Goal("Held-out combinations: every one of the 8 frames is right", (*_HELD_OUT, "every_frame")),
    Goal("Held-out combinations: a copy of the first frame would be right", (*_HELD_OUT, "copy_strict")),
    Goal("Held-out combinations: PSNR", (*_HELD_OUT, "psnr"), "dB", at_least=29.0),
    Goal("Two acts in one sentence: the whole last frame is right", (*_COMPOSED, "strict"), at_least=0.88),
    Goal("Two acts in one sentence: the same with 0 denoising steps", (*_COMPOSED, "forecast_strict")),
    Goal(
        "Paraphrases in words of the grammar: the named object is right",
        (*_WORDINGS, "known words", "named"),
        at_least=0.80,
    ),
    Goal(
        "Paraphrases in words of the grammar: the same with 0 denoising steps",
        (*_WORDINGS, "known words", "forecast_named"),
    ),
    Goal(
        "Paraphrases in words of the grammar: a copy of the first frame would be right",
        (*_WORDINGS, "known words", "copy_named"),
    ),
    Goal(
        "Paraphrases with unseen nouns and colours: the named object is right",
        (*_WORDINGS, "unseen words", "named"),
        at_least=0.60,
    ),
    Goal(
        "Paraphrases with unseen nouns and colours: the same with 0 denoising steps",
        (*_WORDINGS, "unseen words", "forecast_named"),
    ),
    Goal("Sentences that ask for nothing: nothing changes", (*_WORDINGS, "nothing", "strict"), at_least=0.95),
    Goal("Control: the named object is right under another clip's text", ("control", "named"), at_most=0.05),
    Goal(
        "Rollout, one act a round, round 1: the whole last frame is right",
        ("rollouts", "strict", 0),
        at_least=0.92,
    ),
    Goal(
        "Rollout, one act a round, round 5: the whole last frame is right",
        ("rollouts", "strict", 4),
        at_least=0.80,
    ),
    Goal(
        "Rollout, one act a round, round 10: the whole last frame is right",
        ("rollouts", "strict", 9),
        at_least=0.75,
    ),
    Goal(
        "Rollout, one act a round, round 10: the same with 0 denoising steps",
        ("rollouts", "forecast_strict", 9),
    ),
    Goal("Text to image: every object is right", ("text_to_image", "strict"), at_least=0.85),
    Goal("Text to video: the whole first frame is right", ("text_to_video", "first")),
    Goal("Text to video: the object that acts is right at the end", ("text_to_video", "named")),
    Goal("Text to video: the same of a clip in which nothing happens", ("text_to_video", "still_named")),
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
            f"Uncertain futures, {steps} denoising steps: every frame shows one lawful outcome",
            ("chance", f"{steps} steps", "valid"),
            at_least=0.90 if steps else None,
        )
        for steps in UNCERTAIN_STEPS
    ),
    Goal(
        "Uncertain futures: a copy of the first frame would be lawful",
        ("chance", "baselines", "copy_last_frame"),
    ),
    *(
        Goal(
            f"Uncertain futures, {steps} denoising steps: total variation over {SEEDS} seeds",
            ("chance", f"{steps} steps", "total_variation"),
            "",
            at_most=0.15 if steps else None,
        )
        for steps in UNCERTAIN_STEPS
    ),
    Goal(
        f"Uncertain futures: total variation of {SEEDS} exact draws",
        ("chance", "baselines", "sampling_noise"),
        "",
    ),
    *(
        Goal(
            f"Memory: a hidden object comes back right; rounds hidden: {hidden}",
            ("memory", f"rounds hidden: {hidden}", "named"),
            at_least=goal,
        )
        for hidden, goal in zip(HIDDEN_ROUNDS, (0.95, 0.90, 0.80), strict=True)
    ),
    *(
        Goal(
            f"Memory: the same if all rounds before are forgotten; rounds hidden: {hidden}",
            ("memory", f"rounds hidden: {hidden}", "forgotten_named"),
        )
        for hidden in HIDDEN_ROUNDS
    ),
    *(
        Goal(
            f"Films: an object that moved goes on; rounds of the film: {rounds}",
            ("films", f"rounds of film: {rounds}", "named"),
            at_least=0.90,
        )
        for rounds in FILM_ROUNDS
    ),
    *(
        Goal(
            f"Films: the same from the last frame alone; rounds of the film: {rounds}",
            ("films", f"rounds of film: {rounds}", "image_named"),
        )
        for rounds in FILM_ROUNDS
    ),
    Goal("Speed of one session", ("speed", "fps"), "fps", at_least=100.0),
    Goal("Action to first frame", ("speed", "first_frame"), "s", at_most=0.150),
    Goal("Cost of round 50 against round 2", ("speed", "late_to_early"), "x", at_most=1.1),
)
