"""`worldmodel describe`: words about observations."""

from worldmodel.cli.model import load_model
from worldmodel.cli.parser import Parser
from worldmodel.errors import InputError


def main(argv: list[str]) -> int:
    """Say what an observation shows, answer a question about it, or name the action between two."""
    parser = Parser(
        "worldmodel describe",
        "Say what an image or a video shows, answer a question about it, or (with --after) say which action\n"
        "led from it to a second one.",
        "worldmodel describe first_frame.png\n"
        '  worldmodel describe first_frame.png "how many things are there"\n'
        "  worldmodel describe first_frame.png --after clip.mp4",
    )
    parser.add_argument("observation", metavar="OBSERVATION", help="an image or a video")
    parser.add_argument("question", metavar="QUESTION", nargs="?", help="what to ask (default: describe it)")
    parser.add_argument("--after", metavar="OBSERVATION", help="a later observation: which action led there?")
    parser.add_argument(
        "--model", default="shapes-tiny", help="a shipped model or a model folder (%(default)s)"
    )
    args = parser.parse_intermixed_args(argv)
    if args.question is not None and args.after is not None:
        raise InputError("A question and --after ask for two things; leave one of them out.")
    session = load_model(args.model).session()
    session.reset(args.observation)
    if args.after is not None:
        session.observe(args.after)
        print(session.infer_action())
    else:
        print(session.describe(args.question))
    return 0
