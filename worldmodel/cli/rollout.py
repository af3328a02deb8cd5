"""`worldmodel rollout`: play a list of actions and write what happens."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel.cli.model import load_model
from worldmodel.cli.parser import Parser
from worldmodel.errors import InputError
from worldmodel.io import staged_files
from worldmodel.types import Action

if TYPE_CHECKING:
    from worldmodel.rollout import Session

MAX_ROUNDS = 250
"""The contact sheet has a row per round; longer rollouts are the Python API's."""
MAX_ACTION_FILE_BYTES = 2**20
FILES = ("rollout.mp4", "rollout.gif", "sheet.png")


def main(argv: list[str]) -> int:
    """Play a list of actions from an image, a video or a caption, and write what happens."""
    args = _parser().parse_intermixed_args(argv)
    observation, words = (None, args.given) if args.text is not None else _split(args.given)
    actions = _actions(words, args.actions, args.rounds)
    with staged_files(args.out) as staged:
        model = load_model(args.model)
        for action in actions:
            model.action.validate(action, model.backbone)
        session = model.session(args.seed, args.num_inference_steps, args.guidance_scale)
        session.reset(observation, text=args.text)
        play(session, actions)
        for name in FILES:
            session.save(staged / name)
    for name in FILES:
        print(f"wrote {Path(args.out) / name}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "worldmodel rollout",
        "Play actions from an image, a video or a caption; writes rollout.mp4, rollout.gif and sheet.png\n"
        "(a row per round).",
        'worldmodel rollout first_frame.png "the red ball moves left" keys:blue+jump wait --out mine\n'
        '  worldmodel rollout --text "night background, a small red ball at the left" "the ball grows"\n'
        "  worldmodel rollout clip.mp4 --actions actions.txt --rounds 20",
    )
    parser.usage = "worldmodel rollout [options] OBSERVATION ACTION [ACTION ...]"
    parser.add_argument(
        "given",
        nargs="*",
        metavar="OBSERVATION|ACTION",
        help="an image or video to start from (left out with --text), then the actions: a sentence, "
        "keys:red+left, mouse:0.1,-0.5, vector:0.1,-0.5, wait, or JSON for a camera or several at once: "
        '{"keys": ["w"], "camera": {"mode": "velocity", "data": {"translation": [0, 0, 1]}}}',
    )
    parser.add_argument(
        "--text", metavar="CAPTION", help="start from a described world instead of an observation"
    )
    parser.add_argument(
        "--actions", metavar="FILE", help="text file with one action a line; # begins a comment"
    )
    parser.add_argument(
        "--model", default="shapes-tiny", help="a shipped model or a model folder (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="repeat or cut the list to N actions")
    parser.add_argument(
        "--out", default="outputs/rollout", metavar="FOLDER", help="where files go (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same frames (%(default)s)"
    )
    parser.add_argument(
        "--num-inference-steps", type=int, metavar="N", help="denoising steps (the model's own)"
    )
    parser.add_argument(
        "--guidance-scale", type=float, metavar="X", help="1 is no guidance (the model's own)"
    )
    return parser


def _split(given: list[str]) -> tuple[str, list[str]]:
    if not given:
        raise InputError("There is nothing to start from; name an image or a video, or pass --text CAPTION.")
    return given[0], given[1:]


def _actions(words: list[str], file: str | None, rounds: int | None) -> list[Action]:
    """Return the actions of every round, from the command line or a file."""
    if rounds is not None and not 1 <= rounds <= MAX_ROUNDS:
        raise InputError(f"--rounds is {rounds}; use 1 to {MAX_ROUNDS}.")
    if words and file:
        raise InputError(
            "Actions are given twice; name them on the command line or in --actions FILE, not both."
        )
    actions = [parse_action(word) for word in (read_lines(file) if file else words)]
    if not actions:
        source = f"{file!r} holds no action" if file else "There is no action"
        raise InputError(f'{source}; name one, for example "the red ball moves left" or wait.')
    count = len(actions) if rounds is None else rounds
    if count > MAX_ROUNDS:
        raise InputError(f"There are {count} actions; a rollout takes up to {MAX_ROUNDS}: split the list.")
    return [actions[index % len(actions)] for index in range(count)]


def parse_action(word: str) -> Action:
    """Read an action of the command line.

    It is a sentence, `keys:red+left`, `mouse:0.1,-0.5`, `vector:0.1,-0.5`, `wait`, or JSON for `Action.of`.

    Raises:
        InputError: the action is empty, its numbers are none, or it is no JSON.
    """
    kind, _, rest = word.strip().partition(":")
    if kind == "wait" and not rest:
        return Action()
    if kind == "keys":
        keys = tuple(key.strip() for key in rest.split("+"))
        if not all(keys):
            raise InputError(f"The action {word!r} names no key somewhere; write it like keys:red+left.")
        return Action(keys=keys)
    if kind in ("mouse", "vector"):
        try:
            return Action.of({kind: [float(number) for number in rest.split(",")]})
        except ValueError:
            raise InputError(
                f"The action {word!r} is no list of numbers; write it like {kind}:0.1,-0.5."
            ) from None
    if word.lstrip().startswith("{"):
        try:
            return Action.of(json.loads(word))
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, InputError) else "It is no JSON."
            raise InputError(f"The action {word!r} cannot be read: {reason}") from None
    return Action.of(word)


def read_lines(file: str | Path) -> list[str]:
    """Read a text file's lines without blank ones and comments.

    Raises:
        InputError: the file cannot be read, is no UTF-8 text, or is larger than 1 MiB.
    """
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(MAX_ACTION_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(f"The file {str(file)!r} cannot be read ({reason}); pass a text file.") from None
    if len(data) > MAX_ACTION_FILE_BYTES:
        raise InputError(
            f"The file {str(file)!r} is larger than 1 MiB; pass one action a line, {MAX_ROUNDS} at most."
        )
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def play(session: "Session", actions: list[Action]) -> None:
    """Step through the actions and print a line for each."""
    width = min(60, max(len(str(action)) for action in actions))
    count = str(len(actions))
    for index, action in enumerate(actions, 1):
        began = time.perf_counter()
        frames = session.step(action)
        rate = len(frames) / (time.perf_counter() - began)
        print(f"round {index:{len(count)}d}/{count}  {action!s:{width}s}  {rate:5.0f} frames/s")
