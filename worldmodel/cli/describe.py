"""`worldmodel describe`: text about observations."""

from worldmodel.actions.words import say
from worldmodel.cli.model import (
    add_base_option,
    add_device_option,
    add_observation_option,
    check_files,
    check_observation,
    load_model,
)
from worldmodel.cli.parser import MODEL_HELP, Parser, option
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Describe an observation, answer a question about it, or infer the action between two."""
    parser = Parser(
        "worldmodel describe",
        "Describe an image or a video, answer a question about it, or (with --after) infer the action that\n"
        "led from it to a second one.",
        "worldmodel describe first_frame.png\n"
        '  worldmodel describe first_frame.png "how many things are there"\n'
        "  worldmodel describe first_frame.png --after clip.mp4",
    )
    parser.add_argument("observation", metavar="OBSERVATION", help="path of an image or a video")
    parser.add_argument(
        "question", metavar="QUESTION", nargs="?", help="a question about it (default: describe it)"
    )
    option(parser, "--after", "a later observation: infer the action between", metavar="OBSERVATION")
    parser.add_argument("--model", default="shapes-tiny", help=MODEL_HELP)
    add_observation_option(parser)
    add_device_option(parser)
    add_base_option(parser)
    args = parser.parse_intermixed_args(argv)
    if args.question is not None and args.after is not None:
        raise InputError(
            f"The question {args.question!r} and --after exclude each other; leave one of them out."
        )
    check_files(args.observation, args.after)
    session = load_model(args.model, base=args.base, device=args.device).session()
    session.reset(args.observation)
    check_observation(session, args.max_observation_score)
    if args.after is not None:
        session.observe(args.after)
        print(say(session.infer_action()))
    else:
        print(session.describe(args.question))
