"""`worldmodel rollout`: generate a video from an observation and a list of actions."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel.actions import control_kinds
from worldmodel.cli.model import (
    add_base_option,
    add_device_option,
    add_inference_options,
    add_observation_option,
    check_files,
    check_model,
    check_observation,
    load_model,
)
from worldmodel.cli.parser import MODEL_HELP, Parser, option, seed_number
from worldmodel.errors import InputError
from worldmodel.io import staged_files

if TYPE_CHECKING:
    from worldmodel.actions import Action
    from worldmodel.rollout import Session

MAX_ROUNDS = 250
"""The contact sheet has one row per round; use the Python API for longer rollouts."""
FILES = ("rollout.mp4", "rollout.gif", "sheet.png")


def main(argv: list[str]) -> None:
    """Roll out a list of actions and write the video."""
    args = _parser().parse_intermixed_args(argv)
    observation, words = (None, args.given) if args.text is not None else _split(args.given)
    check_files(observation, args.actions)
    check_model(args.model)
    actions = _actions(words, args.actions, args.rounds)
    with staged_files(args.out) as staging:
        model = load_model(args.model, args, args.base, args.device)
        for action in actions:
            model.action.validate(action, model.backbone)
        session = model.session(
            args.seed, args.num_inference_steps, args.guidance_scale, args.negative_prompt
        )
        session.reset(observation, text=args.text)
        if observation is not None:
            check_observation(session, args.max_observation_score)
        play(session, actions)
        for name in FILES:
            session.save(staging / name)
    for name in FILES:
        print(f"wrote {Path(args.out) / name}")


def _parser() -> Parser:
    kinds = ", ".join(kind.name for kind in control_kinds())
    parser = Parser(
        "worldmodel rollout",
        "Generate a video round by round, from an image, a video or a caption and a list of actions. Writes\n"
        "rollout.mp4, rollout.gif and sheet.png (a contact sheet with one row per round).",
        'worldmodel rollout first_frame.png "the red ball moves left" keys:blue+jump wait --out mine\n'
        '  worldmodel rollout --text "night background, a small red ball at the left" "the ball grows"\n'
        "  worldmodel rollout clip.mp4 --actions actions.txt --rounds 20",
    )
    parser.usage = "worldmodel rollout [options] OBSERVATION ACTION [ACTION ...]"
    parser.add_argument(
        "given",
        nargs="*",
        metavar="OBSERVATION|ACTION",
        help="path of the image or video to start from (omit it with --text), then the actions: a sentence, "
        f"KIND:VALUE such as keys:red+left or vector:0.1,-0.5 ({kinds}), wait (no action), or JSON for "
        'several kinds at once: {"keys": ["w"], "mouse": [0.1, -0.5]}',
    )
    option(parser, "--text", "start from a caption instead of an observation", metavar="CAPTION")
    option(parser, "--actions", "text file with one action per line; # begins a comment", metavar="FILE")
    parser.add_argument("--model", default="shapes-tiny", help=MODEL_HELP)
    option(parser, "--rounds", "repeat or cut the list to N actions", kind=int)
    option(parser, "--out", "output folder", "outputs/rollout", metavar="FOLDER")
    option(parser, "--seed", "equal seeds give equal frames", 0, kind=seed_number)
    option(parser, "--num-inference-steps", "denoising steps (default: the model's)", kind=int)
    option(
        parser,
        "--guidance-scale",
        "classifier-free guidance; 1 disables it (default: the model's)",
        kind=float,
    )
    option(
        parser,
        "--negative-prompt",
        "text that guidance leads away from, for models whose generator reads text",
        metavar="TEXT",
    )
    add_observation_option(parser)
    add_device_option(parser)
    add_base_option(parser)
    add_inference_options(parser)
    return parser


def _split(given: list[str]) -> tuple[str, list[str]]:
    if not given:
        raise InputError("The observation is missing; pass an image or a video, or --text CAPTION.")
    return given[0], given[1:]


def _actions(words: list[str], file: str | None, rounds: int | None) -> "list[Action]":
    """Return one action per round."""
    from worldmodel.rollout.action_list import parse_action, read_actions

    if rounds is not None and not 1 <= rounds <= MAX_ROUNDS:
        raise InputError(f"--rounds is {rounds}; use 1 to {MAX_ROUNDS}.")
    if words and file:
        raise InputError(
            f"Actions are given as arguments ({words[0]!r}) and by --actions {file!r}; use one of the two."
        )
    actions = read_actions(file) if file else [parse_action(word) for word in words]
    if not actions:
        raise InputError('There are no actions; pass one, for example "the red ball moves left" or wait.')
    count = len(actions) if rounds is None else rounds
    if count > MAX_ROUNDS:
        raise InputError(f"There are {count} actions; a rollout takes up to {MAX_ROUNDS}: split the list.")
    return [actions[index % len(actions)] for index in range(count)]


def play(session: "Session", actions: "list[Action]") -> None:
    """Step through the actions and print one line per round."""
    width = min(60, max(len(str(action)) for action in actions))
    count = str(len(actions))
    for index, action in enumerate(actions, 1):
        start = time.perf_counter()
        frames = session.step(action).frames
        rate = len(frames) / (time.perf_counter() - start)
        print(f"round {index:{len(count)}d}/{count}  {action!s:{width}s}  {rate:5.0f} frames/s")
