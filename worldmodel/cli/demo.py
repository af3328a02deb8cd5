"""`worldmodel demo`: a web page to steer a model."""

from worldmodel.cli.parser import Parser
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Show the page until interrupted."""
    parser = Parser(
        "worldmodel demo",
        "Open a web page on which you steer a model, by text or by suggested actions, and can undo steps.\n"
        "The page uses a running server (--server), or starts one for itself.",
        "worldmodel demo shapes-tiny\n  worldmodel demo --server http://127.0.0.1:8000 --world shapes",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="model to serve: a name or a folder (default: shapes-tiny)"
    )
    parser.add_argument(
        "--server", metavar="URL", help="a running server; its API key is read from WORLDMODEL_API_KEY"
    )
    parser.add_argument(
        "--world",
        metavar="NAME",
        help="world whose start images and actions are suggested (default: that of MODEL; with --server "
        "there are no suggestions without it)",
    )
    parser.add_argument("--port", type=int, help="port of the page (default: a free one from 7860)")
    args = parser.parse_args(argv)
    if args.model and args.server:
        raise InputError(f"MODEL {args.model!r} and --server exclude each other; leave one of them out.")

    from worldmodel.demo import app

    model = None if args.server else args.model or "shapes-tiny"
    app.run(model, args.server, args.port, args.world)
