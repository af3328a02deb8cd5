"""`worldmodel demo`: a web page to steer a model."""

from worldmodel import config as configs
from worldmodel.cli.model import add_device_option, check_model
from worldmodel.cli.parser import Parser, option
from worldmodel.config.flow import FlowConfig
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Show the page until interrupted."""
    parser = Parser(
        "worldmodel demo",
        "Open a web page on which you steer a model, by text or by suggested actions, and can undo steps.\n"
        "The page uses a running server (--server), or starts one for itself.",
        "worldmodel demo shapes-tiny\n  worldmodel demo --server http://127.0.0.1:8000 --world shapes\n"
        "  worldmodel demo --host 0.0.0.0\n  worldmodel demo --flow web.yaml",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="model to serve: a name or a folder (default: shapes-tiny)"
    )
    option(parser, "--server", "a running server; its API key is read from WORLDMODEL_API_KEY", metavar="URL")
    option(
        parser,
        "--world",
        "world whose actions are suggested (default: that of MODEL; with --server there are no "
        "suggestions without it)",
        metavar="NAME",
    )
    parser.add_argument("--port", type=int, help="port of the page (default: a free one from 7860)")
    option(
        parser,
        "--host",
        "address at which the page listens; 0.0.0.0 lets phones and other machines in the network play, by "
        "an address with a key that the command prints, also as a QR code (default: 127.0.0.1). "
        "WORLDMODEL_DEMO_KEY sets the key.",
        default="127.0.0.1",
    )
    add_device_option(parser)
    option(parser, "--flow", "a data flow, whose clips a tab of the page shows", metavar="CONFIG")
    args = parser.parse_args(argv)
    if args.model and args.server:
        raise InputError(f"MODEL {args.model!r} and --server exclude each other; leave one of them out.")

    if args.device and args.server:
        raise InputError(f"--device {args.device!r} and --server exclude each other; leave one of them out.")

    model = None if args.server else args.model or "shapes-tiny"
    if model is not None:
        check_model(model)
    flow = configs.load(args.flow, [], FlowConfig) if args.flow else None

    from worldmodel.demo import app

    app.run(model, args.server, args.port, args.world, flow, args.host, args.device)
