"""`worldmodel record`: record an environment, or a world of the library, as training data."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldmodel.cli.parser import Parser, option, seed_number
from worldmodel.data.twins import STEPS
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Record episodes."""
    args = _parser().parse_args(argv)
    from worldmodel import recording
    from worldmodel.worlds import get_world, world_names

    if args.env in world_names():
        if args.twins:
            raise InputError(f"--twins is for environments, and {args.env} is a world of the library.")
        path = get_world(args.env).record(
            args.out,
            args.episodes,
            args.rounds,
            args.seed,
            frame_size(args.size),
            args.format or "clips",
            progress=True,
        )
    else:
        from worldmodel.recording.settings import EnvironmentSettings

        settings = EnvironmentSettings(
            args.env,
            args.policy,
            args.seed,
            args.max_steps,
            frame_size(args.size),
            args.frame_skip,
            args.fps,
            tuple(args.camera),
            args.epsilon,
            _action_details(args),
            dict(map(env_arg, args.env_arg)),
        )
        path = recording.record_environment(
            settings,
            args.out,
            args.episodes,
            args.format or "lerobot",
            args.workers,
            progress=True,
            num_twins=args.twins,
            twin_steps=args.twin_steps,
        )
    print(f"{args.episodes} episodes{f' and {args.twins} twins' * bool(args.twins)}: {path}")


def _parser() -> Parser:
    parser = Parser(
        "worldmodel record",
        "Record episodes of a Gymnasium environment, or of a world of the library, as training data.\n"
        "Run the same command again to go on after an interruption, or with more episodes.",
        "worldmodel record CartPole-v1 --out cartpole --episodes 200 --size 64 --twins 100\n"
        "  worldmodel record minigrid:MiniGrid-DoorKey-6x6-v0 --out doorkey --policy sticky --workers 2\n"
        "  worldmodel record shapes --out clips --episodes 24",
    )
    parser.add_argument("env", metavar="ENV_ID", help="id of an environment, module:ID, or name of a world")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    option(parser, "--episodes", "number of episodes", 100)
    parser.add_argument(
        "--format",
        choices=("lerobot", "clips"),
        help="LeRobot v3.0, or a table of clips (default: lerobot; clips for worlds)",
    )
    option(parser, "--size", "size of the frames (default: that of the environment)", "", metavar="N|HxW")
    option(parser, "--seed", "seed of the episodes", 0, kind=seed_number)
    _add_environment_options(parser)
    world = parser.add_argument_group("worlds")
    option(world, "--rounds", "actions per episode", 3)
    return parser


def _add_environment_options(parser: Parser) -> None:
    environment = parser.add_argument_group("environments")
    environment.add_argument(
        "--policy",
        default="random",
        help="random, sticky (repeats actions), module:function of (observation, action space, random "
        "generator), module:Class of (environment), or sb3:ALGORITHM:FILE, whose file can run code "
        "(default: %(default)s)",
    )
    environment.add_argument(
        "--epsilon", type=float, default=0.0, help="share of random actions (default: %(default)s)"
    )
    option(environment, "--max-steps", "longest episode", 1000)
    option(environment, "--frame-skip", "steps per action", 1)
    option(environment, "--fps", "actions per second (default: render_fps)", 0)
    option(
        environment,
        "--camera",
        "render, observation or observation.NAME; may be repeated",
        metavar="NAME",
        repeated=True,
    )
    option(
        environment,
        "--action-spec",
        "JSON list with name, unit, scale and frame of each number of an action",
        metavar="FILE",
    )
    option(
        environment,
        "--keys",
        "names of the keys, such as glide,flap (default: those of the environment, or action_0, action_1, …)",
        "",
        metavar="NAME,NAME",
    )
    option(environment, "--env-arg", "argument of the environment", metavar="KEY=VALUE", repeated=True)
    option(environment, "--workers", "processes that play", 0)
    option(
        environment,
        "--twins",
        "pairs of twin futures, by which `worldmodel eval` and training say whether a model obeys: held-out "
        "episodes are played again up to a moment, and from there on with two random sequences of actions",
        0,
    )
    option(environment, "--twin-steps", "steps of these futures", STEPS)


def frame_size(text: str) -> int | tuple[int, int] | None:
    """Read a side or HEIGHTxWIDTH; None if the text is empty."""
    try:
        sides = [int(side) for side in text.split("x")] if text else []
    except ValueError:
        sides = [0]
    if not all(side >= 16 and side % 2 == 0 for side in sides) or len(sides) > 2:
        raise InputError(f"--size is {text!r}; use an even number from 16 up, or two such as 96x128.")
    return None if not sides else sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _action_details(args: Namespace) -> tuple[Mapping[str, Any], ...]:
    """Return what the user says of each number of an action; empty if nothing."""
    if not args.keys:
        return tuple(_json_file(args.action_spec) if args.action_spec else ())
    if args.action_spec:
        raise InputError("--keys and --action-spec both name the actions; use one of them.")
    names = [name.strip() for name in args.keys.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise InputError(f"--keys is {args.keys!r}; use a different name for each, such as glide,flap.")
    return tuple({"name": name} for name in names)


def _json_file(path: str) -> list[Any]:
    try:
        value = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--action-spec {path!r} cannot be read as JSON ({error}).") from None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InputError(f"--action-spec {path!r} is not a list of mappings; see docs/how-to/record.md.")
    return value


def env_arg(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE, whose value may be JSON."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise InputError(f"--env-arg is {text!r}; use KEY=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
