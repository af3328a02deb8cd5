"""The model card: what a folder's README.md says about the model in it."""

from collections.abc import Mapping
from typing import Any

from worldmodel.eval.goals import Goal, interval, show
from worldmodel.eval.report import table_rows

_FRONT = """---
license: apache-2.0
library_name: worldmodel
pipeline_tag: image-to-video
tags:
- world-model
- any-to-any
- video-generation
- image-to-video
- text-to-image
- flow-matching
---
"""

_ABOUT = """A small any-to-any world model of a procedural world: shapes of eight colours on dark backgrounds
that obey sentences such as "the red ball moves left". A language model predicts the state of the world after
an action at query positions; a flow-matching generator shows it as video; the same language model describes
pictures, answers questions about them and says which action it saw. It continues its own frames round after
round.
"""


def model_card(results: Mapping[str, Any], name: str, training: Mapping[str, Any] | None = None) -> str:
    """Write a model card in markdown from what was measured.

    Args:
        results: What `evaluate` returned.
        name: Shipped name or folder of the model, for the commands.
        training: How the model was made; of it `command`, `commit`, `minutes`, `hardware` and `stages` (each
            with `objective`, `steps`, `minutes`) are told where they are there.
    """
    parts = [
        _FRONT,
        f"# {name}\n",
        _ABOUT,
        _use(name),
        _figures(results),
        _data(),
        _training(training or {}),
        _limits(results),
        _reproduce(results, name),
    ]
    return "\n".join(parts)


def _use(name: str) -> str:
    return f"""## Use

```python
from worldmodel import WorldModel

session = WorldModel.from_pretrained("{name}").session(seed=0)
session.reset("first_frame.png")            # or reset(text="night background, a small red ball at the left")
frames = session.step("the red ball moves left")    # uint8 [8, 64, 64, 3]; call it again and again
print(session.describe(), "|", session.infer_action())
session.save("rollout.mp4")
```

```sh
worldmodel rollout first_frame.png "the red ball moves left" "the blue box jumps" --model {name}
```
"""


def _figures(results: Mapping[str, Any]) -> str:
    lines = ["| Figure | Goal | Measured | 95 % interval | n |", "|---|---:|---:|---:|---:|"]
    for goal, figure in table_rows(results):
        missed = " (missed)" if goal.met(figure) is False else ""
        lines.append(
            f"| {goal.title} | {goal.text or '–'} | {show(figure['value'], goal.unit)}{missed} "
            f"| {interval(figure, goal.unit)} | {figure['n']} |"
        )
    settings, machine = results["settings"], results["machine"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    steps = settings["num_inference_steps"]
    conditions = (
        f"Measured with seed {settings['seed']} and {steps} denoising step{'s' if steps != 1 else ''}; "
        f"speed on {threads} of {machine['processor']}, PyTorch {machine['torch']}. "
        "*Right* is decided by finding the objects in the pixels: colour, shape, size, and place within "
        "3 pixels (4 for a named one). *Held-out* combinations of colour, shape and verb never occur in "
        "training."
    )
    return "## Figures\n\n" + "\n".join(lines) + f"\n\n{conditions}\n"


def _data() -> str:
    return """## Data

Everything is drawn by the library's own simulator (`worldmodel.worlds.shapes`) from a seed: no files, no
people, no third-party data. One eighth of all combinations of colour, shape and verb is held out.
"""


def _training(training: Mapping[str, Any]) -> str:
    lines = ["## Training", ""]
    for key, title in (("command", "Command"), ("commit", "Commit")):
        if training.get(key):
            lines.append(f"- {title}: `{training[key]}`")
    if training.get("hardware"):
        lines.append(f"- Hardware: {training['hardware']}")
    if training.get("minutes"):
        lines.append(f"- Time: {training['minutes']:.0f} minutes of wall clock")
    stages = training.get("stages") or {}
    if stages:
        lines += ["", "| Stage | Objective | Steps | Minutes |", "|---|---|---:|---:|"]
        for name, stage in stages.items():
            cells = [str(stage.get(key, "–")) for key in ("objective", "steps", "minutes")]
            lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "## Training\n\nNot recorded.\n"


def _limits(results: Mapping[str, Any]) -> str:
    lines = [
        "- It knows one world of flat shapes at 64 x 64 pixels and 8 frames a second, and the sentences "
        "of that world; a photograph or another wording leads to nonsense without a warning."
    ]
    lines += [_missed(goal, figure) for goal, figure in table_rows(results) if goal.met(figure) is False]
    lines += [*_weak_verbs(results["figures"]), *_drift(results["figures"])]
    lines.append("- One seed of training; differences smaller than the intervals above mean nothing.")
    return "## Limits\n\n" + "\n".join(lines) + "\n"


def _missed(goal: Goal, figure: Mapping[str, Any]) -> str:
    return f"- Goal missed. {goal.title} ({show(figure['value'], goal.unit)}, goal {goal.text})."


def _weak_verbs(figures: Mapping[str, Any]) -> list[str]:
    by_verb = figures.get("action_following", {}).get("held-out", {}).get("by_verb", {})
    ranked = sorted(by_verb, key=lambda verb: by_verb[verb]["strict"]["value"])[:3]
    weak = [verb for verb in ranked if by_verb[verb]["strict"]["value"] < 1]
    told = [f"{verb} ({show(by_verb[verb]['strict']['value'], '%')})" for verb in weak]
    return (
        [f"- Weakest verbs on held-out combinations, whole frame right: {', '.join(told)}."] if told else []
    )


def _drift(figures: Mapping[str, Any]) -> list[str]:
    strict = figures.get("rollouts", {}).get("strict", [])
    if len(strict) < 2:
        return []
    first, last = (show(figure["value"], "%") for figure in (strict[0], strict[-1]))
    return [
        f"- Errors add up: the whole frame is right in {first} of rollouts in round 1, "
        f"in {last} in round {len(strict)}."
    ]


def _reproduce(results: Mapping[str, Any], name: str) -> str:
    settings = results["settings"]
    return (
        "## Reproduce\n\n```sh\n"
        f"worldmodel eval {name} --num-samples {settings['num_samples']} --rounds {settings['rounds']} "
        f"--seed {settings['seed']}\n```\n"
    )
