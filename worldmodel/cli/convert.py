"""`worldmodel convert`: write a dataset of another format as a LeRobot dataset."""

from worldmodel.cli.parser import Parser, option
from worldmodel.cli.record import env_arg, frame_size
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Convert, after the episodes that the folder has."""
    args = _parser().parse_args(argv)
    from worldmodel import recording
    from worldmodel.recording.settings import ConversionSettings

    kind, colon, path = args.source.partition(":")
    if not colon or not path:
        raise InputError(f"SOURCE is {args.source!r}; use minari:NAME, minari:FOLDER or vpt:FOLDER.")
    settings = ConversionSettings(
        path,
        frame_size(args.size),
        args.fps,
        tuple(args.camera),
        args.env,
        dict(map(env_arg, args.env_arg)),
        args.max_steps,
    )
    print(recording.convert(kind, settings, args.out, args.episodes, progress=True))


def _parser() -> Parser:
    parser = Parser(
        "worldmodel convert",
        "Convert a dataset to LeRobot v3.0, to train on it: a Minari dataset, or recordings of Minecraft\n"
        "in the format of Video PreTraining. Run the same command again to go on after an interruption.",
        "worldmodel convert minari:minigrid/BabyAI-Pickup/optimal-v0 --out pickup \\\n"
        "    --env minigrid:BabyAI-Pickup-v0 --size 64\n"
        "  worldmodel convert vpt:recordings --out minecraft --size 72x128",
    )
    parser.add_argument("source", metavar="SOURCE", help="minari:NAME, minari:FOLDER or vpt:FOLDER")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    option(parser, "--episodes", "number of episodes (default: all)", kind=int)
    option(parser, "--size", "size of the frames (default: that of the dataset)", "", metavar="N|HxW")
    option(parser, "--fps", "minari: actions per second (default: render_fps)", 0)
    option(
        parser,
        "--camera",
        "minari: observation or observation.NAME, or with --env render; may be repeated",
        metavar="NAME",
        repeated=True,
    )
    option(
        parser,
        "--env",
        "minari: environment in which the episodes are played again, where observations are not images",
        "",
        metavar="ENV_ID",
    )
    option(parser, "--env-arg", "argument of the environment", metavar="KEY=VALUE", repeated=True)
    option(parser, "--max-steps", "vpt: longest episode, in actions", 1000)
    return parser
