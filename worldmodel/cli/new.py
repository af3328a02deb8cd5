"""`worldmodel new`: write a config that trains a model from scratch on a dataset."""

import math
import re
import sys
from argparse import Namespace
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldmodel.cli.parser import Parser, option
from worldmodel.config import SourceConfig, StateConfig, VisionConfig, height_width
from worldmodel.errors import InputError, WorldModelError

if TYPE_CHECKING:
    from worldmodel.data.facts import DatasetFacts
    from worldmodel.data.twins import Inside
    from worldmodel.train.recipe import Machine, Recipe

NUM_TWINS, NUM_BRANCHES = 100, 500
NUM_LOOKED_AT = 40
"""Pairs of twins by which the size of what actions move is measured, and moments that are tried for
chance."""
UNCERTAIN = 0.1
"""Share of the moments with several possible futures from which states have a code that chooses one."""
FEW_PIXELS, MAX_SIDE = 24, 128
"""Where an action changes fewer pixels, frames are larger, up to this side and to their recorded size."""
SLOW_ROUNDS, ACTIONS_OF_SLOW = 3, 2
"""Where an action shows after so many rounds or more, a round has several of them, each with its frame: what
actions do is learned from single rounds first, and after one action those of a slow world hardly differ."""
TWINS_SHARE = 0.05
"""Share of the time that recording twin futures may take, and branches the same."""
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def main(argv: list[str]) -> None:
    """Look at the data and at the machine, write the config and print what to do next."""
    args = _parser().parse_args(argv)
    budget_s, path = seconds(args.budget), Path(args.out)
    if path.exists() and not args.force:
        raise InputError(f"{args.out!r} exists; choose another --out, or pass --force to replace it.")
    from worldmodel.data.argument import read_source

    read_source(args.dataset)  # before PyTorch is imported, which takes seconds
    from worldmodel.data.examiner import glance
    from worldmodel.data.facts import read_facts
    from worldmodel.data.twins import BRANCHES, FOLDER, twins_of
    from worldmodel.io import atomic_file
    from worldmodel.train.recipe import Machine, plan, timed

    facts, machine = read_facts(args.dataset, path, args.force), Machine.measure()
    recipe = plan(facts, budget_s, machine, f"runs/{path.stem}", args.size)
    print(f"data       {facts.num_episodes} episodes, {facts.width} x {facts.height} pixels")
    for line in glance(recipe.config.data):
        print(f"           {line}")
    print(f"twins      {_futures(facts.train, FOLDER, args.twins, budget_s)}")
    print(f"branches   {_futures(facts.train, BRANCHES, args.branches, budget_s)}")
    uncertain, told = _chance(facts.train, budget_s)
    print(f"chance     {told}")
    if uncertain:
        facts = replace(facts, uncertain=True)
        recipe = plan(facts, budget_s, machine, f"runs/{path.stem}", args.size)
    actor = _actor(recipe)
    side = _side(recipe, facts, actor)
    if not args.size and actor is not None and side:
        recipe = plan(facts, budget_s, machine, f"runs/{path.stem}", side)
        actor = _actor(recipe)
    if actor is not None:
        print(f"actor      {actor}")
        if actor.is_slow and facts.chunk_frames == 1:
            action = {**facts.action, "per_round": ACTIONS_OF_SLOW}
            facts = replace(facts, chunk_frames=ACTIONS_OF_SLOW, action=action)
            recipe = plan(facts, budget_s, machine, f"runs/{path.stem}", args.size or side)
    branches = twins_of(facts.train, BRANCHES)
    if branches is not None:  # half of what is trained on: more actions than a policy takes
        data = recipe.config.data
        sources = {**data.sources, "branches": replace(branches, weight=facts.train.weight)}
        recipe = replace(recipe, config=replace(recipe.config, data=replace(data, sources=sources)))
    recipe = timed(recipe, budget_s)
    with atomic_file(path) as temporary:
        temporary.write_text(as_yaml(recipe, machine, args), encoding="utf-8")
    model = recipe.config.model
    height, width = height_width(model.codec.image_size)
    print(f"machine    {machine.device}, {machine.tflops:.3g} TFLOP/s in a matrix product")
    scaled = "" if (facts.height, facts.width) == (height, width) else ", scaled (see --size)"
    print(f"frames     {width} x {height} pixels{scaled}")
    frame, seen = model.codec.cells, model.codec.cells // model.vision.merge**2
    print(f"model      {recipe.parameters / 1e6:.1f} M parameters, {frame} latent cells per frame")
    count = model.action.per_round
    actions = "the action" if count == 1 else f"{count} actions, one for each frame,"
    print(f"round      {seen} vision tokens, {actions} and {model.num_queries} queries")
    minutes = ", ".join(f"{name} {time / 60:.0f}" for name, time in recipe.seconds.items())
    print(f"time       about {sum(recipe.seconds.values()) / 60:.0f} minutes of steps ({minutes})")
    print(f"memory     about {recipe.memory / 2**30:.1f} GiB, without libraries")
    print(f"config     {path}\n\nnext:\n{_next_steps(args.out, recipe.config.run_dir, bool(facts.held))}")


@dataclass(frozen=True)
class Actor:
    """What actions move, by the median of pairs of twins."""

    pixels: float
    """Number of pixels in which their films differ, in the frame where most do."""
    rounds: float
    """Rounds after which they first differ: 1 is the frame after the action."""

    @property
    def is_small(self) -> bool:
        """Whether larger frames would show more of it."""
        return self.pixels < FEW_PIXELS

    @property
    def is_slow(self) -> bool:
        """Whether the next frames do not show yet what was done, as where an action changes a speed."""
        return self.rounds >= SLOW_ROUNDS

    def __str__(self) -> str:
        when = "at once" if self.rounds == 1 else f"after {self.rounds:.0f} rounds"
        advice = "; that is little: record larger frames, or crop them" if self.is_small else ""
        return f"actions change up to {self.pixels:.0f} pixels, the first of them {when}{advice}"


def _actor(recipe: "Recipe") -> Actor | None:
    """Return what actions move; None without twins that ever differ."""
    import numpy as np

    from worldmodel.eval.data.twins import read_twins, twin_reader
    from worldmodel.eval.metrics.twins import where_differ

    held = recipe.config.data.sources.get("held")
    reader = held and twin_reader(replace(recipe.config.data, sources={"held": held}), recipe.config.model)
    if not reader:
        return None
    pairs = [pair.clips for pair in read_twins(reader, NUM_LOOKED_AT)]
    found = []
    for films in pairs:
        areas = [where_differ(*rounds).sum(axis=(1, 2)).max() for rounds in zip(*films, strict=True)]
        if any(areas):
            found.append((max(areas), next(index for index, area in enumerate(areas, start=1) if area)))
    return Actor(*np.median(found, axis=0).tolist()) if found else None


def _side(recipe: "Recipe", facts: "DatasetFacts", actor: Actor | None) -> int:
    """Return the side of larger frames in which actions change enough pixels; 0 where these suffice."""
    side = max(height_width(recipe.config.model.codec.image_size))
    if actor is None or not actor.is_small or side >= max(facts.height, facts.width):
        return 0
    wanted = side * math.sqrt(FEW_PIXELS / actor.pixels)
    return min(MAX_SIDE, max(facts.height, facts.width), math.ceil(wanted / 16) * 16)


def _futures(source: SourceConfig, inside: "Inside", most: int, budget_s: float) -> str:
    """Record twin futures or branches of a recording, and return what there is of them."""
    from worldmodel.data.twins import FOLDER, recording_folder, twins_of
    from worldmodel.recording import record_twins

    folder = recording_folder(source)
    if twins_of(source, inside):
        return f"in {folder}/{inside}"
    if not most or folder is None:
        return "none, so nothing will tell whether the model obeys" if inside == FOLDER else "none"
    try:
        count = record_twins(folder, most, TWINS_SHARE * budget_s, inside, progress=sys.stderr.isatty())
    except WorldModelError as error:
        return f"none: {error}"
    episodes = "held-out episodes" if inside == FOLDER else "the others, with random actions, to train on"
    return f"{count} pairs of futures of {episodes}, in {folder / inside}"


def _chance(source: SourceConfig, budget_s: float) -> tuple[bool, str]:
    """Return whether the same actions often lead to different futures, and how that was found."""
    from worldmodel.data.twins import recording_folder
    from worldmodel.recording import uncertain_moments

    folder = recording_folder(source)
    if folder is None:
        return False, "not known, since the data are not a recording of this machine"
    try:
        found, moments = uncertain_moments(folder, NUM_LOOKED_AT, TWINS_SHARE * budget_s)
    except WorldModelError as error:
        return False, f"not known: {error}"
    if found <= UNCERTAIN * moments:
        return False, f"the same actions led to the same frames at {moments - found} of {moments} moments"
    return True, f"the same actions led to other frames at {found} of {moments} moments: states have a code"


def seconds(text: str) -> float:
    """Read a time such as 90m, 1h or 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|m|min|h|d)", text.strip())
    if not found or not float(found[1]):
        raise InputError(f"--budget is {text!r}; pass a time such as 30m or 1h.")
    return float(found[1]) * UNITS[found[2]]


def as_yaml(recipe: "Recipe", machine: "Machine", args: Namespace) -> str:
    """Return the config with comments; settings that it leaves out have their defaults."""
    config, model = recipe.config, recipe.config.model
    has_code = model.state is not None and model.state.has_code
    action = model.action.as_dict() | {"spec": [_given(spec) for spec in model.action.spec]}
    defaults = {"per_round": 1, "dropout": 0.0, "spec": []}
    action = {name: value for name, value in action.items() if value != defaults.get(name)}
    side = model.codec.image_size
    codec = {
        "image_size": list(side) if isinstance(side, tuple) else side,
        "temporal_factor": model.codec.temporal_factor,
    }
    backbone = {"vocab_size": model.backbone.vocab_size, "architecture": model.backbone.architecture}
    next_steps = _next_steps(args.out, config.run_dir, bool(config.validation.source))
    lines = [
        f"# A world model from scratch on {args.dataset}, planned for {args.budget} on {machine.device}.",
        *(f"#   {line.strip()}" for line in next_steps.splitlines()),
        "# All settings and their meanings: worldmodel config " + args.out,
        f"run_dir: {config.run_dir}    # checkpoints, metrics, samples and the finished model",
        "seed: 0",
        *([f"init_from: {_flow(config.init_from)}    # it knows other games: the rest starts at random"]
          if config.init_from else []),
        "sample_every: 200          # images of what the model makes, in run_dir/samples",
        "model:",
        f"  fps: {model.fps}",
        f"  chunk_frames: {model.chunk_frames}          # new frames of a round",
        f"  history_rounds: {model.history_rounds}        # rounds remembered",
        f"  context_latents: {model.context_latents}       # latent frames that show how things move",
        *(["  pace: on_action          # each recorded round has an action: the world waits for one"]
          if model.pace == "on_action" else []),
        *(["  query_actions: true      # queries know keys and numbers before the backbone does"]
          if model.query_actions else []),
        *([f"  query_merge: {model.query_merge}          # latent cells along each side that share a query"]
          if model.query_merge > 1 else []),
        *([f"  vision: {{merge: {model.vision.merge}}}      # and that share a vision token"]
          if model.vision.merge != VisionConfig.merge else []),
        *(["  outcomes: true           # rewards and ends of episodes are predicted, too"]
          if model.outcomes else []),
        "  num_inference_steps: 0     # shows the forecast of the state",
        "  generator: null            # what the state decides is all there is to show",
        f"  codec: {_flow(codec)}",
        f"  action: {_flow(action)}",
        f"  backbone: {_flow(backbone)}",
        *([f"  # {CODE}"] if has_code else []),
        f"  state: {_flow(_state(model.state))}",
        "data:",
        "  sources:",
        *(f"    {name}: {_flow(_given(source))}" for name, source in config.data.sources.items()),
    ]  # fmt: skip
    if config.validation.source:
        lines.append("validation: {source: held, every: 200}    # the best checkpoint is kept")
    lines.append("stages:")
    for name, stage in config.stages.items():
        lines += [f"  # {COMMENTS[name]} About {recipe.seconds[name] / 60:.0f} minutes.", f"  {name}:"]
        lines += [f"    {key}: {_flow(value)}" for key, value in _given(stage).items() if key != "train"]
        lines.append(f"    train: {_flow({key: {} for key in stage.train})}")
    return "\n".join([*lines, *([] if has_code else WITHOUT_CODE), ""])


COMMENTS = {
    "codec": "The video autoencoder. When it is trained, the log says what it alone returns of held-out "
    "frames: nothing that it loses can be predicted.",
    "state": "A few rounds in a row: actions and the frames after them.",
    "rollout": "Many rounds from the model's own predictions, through time: what actions add up to.",
}
"""Purpose of each stage."""
CODE = (
    "The same actions lead to several futures here: the code of a state chooses one, by the session's seed."
)
WITHOUT_CODE = (
    "  # Where several futures are possible, a model without a code shows their average. To train one with a",
    "  # code, set code_groups: 2 and code_block: 2 in model.state, and in objective_args free_nats: 4.0 in",
    "  # the stage state and 0.5 in rollout.",
)


def _next_steps(out: str, run_dir: str, held: bool) -> str:
    evaluate = (
        f"  worldmodel eval {run_dir}/model --data {out}" if held else "  (hold episodes out to evaluate)"
    )
    return f"  worldmodel train {out}\n{evaluate}\n  worldmodel demo {run_dir}/model"


def _state(state: StateConfig | None) -> dict[str, int]:
    names = ["width", "num_layers", "num_heads"]
    if state is not None and state.has_code:
        names += ["code_groups", "code_classes", "code_block"]
    return {name: getattr(state, name) for name in names}


def _given(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(settings)
    }
    return {name: value for name, value in vars(settings).items() if value != defaults[name]}


def _flow(value: Any) -> str:
    import yaml

    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _parser() -> Parser:
    parser = Parser(
        "worldmodel new",
        "Look at a dataset and at this machine, time a few real steps, and write a commented config that\n"
        "trains a model from scratch in the given time. Holds a tenth of the episodes out if nothing is\n"
        "held out. If the environment was recorded on this machine, records twin futures of the held-out\n"
        "episodes (see record --twins), and branches of the others: random actions to train on.",
        "worldmodel new doorkey --budget 1h --out doorkey.yaml",
    )
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help="LeRobot dataset (a folder, or lerobot:NAME on the Hub), table of clips or its folder, folder "
        "of videos or of folders of numbered images, or tar files",
    )
    option(parser, "--budget", "training time: 30m, 1h", "1h", metavar="TIME")
    option(parser, "--out", "config to write", "world.yaml", metavar="CONFIG")
    option(
        parser,
        "--size",
        "greatest side of the frames in pixels, which keep their size where it suits the codec "
        "(default: 64, or 128 on a machine with 64 GiB; more where actions change few pixels)",
        0,
    )
    option(parser, "--twins", "most pairs of twin futures that are recorded; 0: none", NUM_TWINS)
    option(
        parser,
        "--branches",
        "most pairs of futures with random actions that are recorded as training data; 0: none",
        NUM_BRANCHES,
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the config, and the parts of a divided table, if they exist",
    )
    return parser
