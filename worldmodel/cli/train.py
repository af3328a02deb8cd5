"""`worldmodel train`: hands over to the training floor, which the library never imports by itself."""

import importlib

from worldmodel.cli.parser import Parser


def main(argv: list[str]) -> int:
    """Train a model as a configuration says."""
    parser = Parser(
        "worldmodel train",
        "Train a model, stage after stage; a run that is started again continues where it stopped.",
        "worldmodel train shapes_tiny run_dir=runs/mine stages.codec.steps=100\n"
        "  torchrun --nproc-per-node 2 -m worldmodel train shapes_tiny",
    )
    parser.add_argument(
        "config", metavar="CONFIG", help="a YAML file, or a shipped name (see `worldmodel config`)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    args = parser.parse_args(argv)
    return importlib.import_module("worldmodel.train.finetune").main([args.config, *args.overrides])
