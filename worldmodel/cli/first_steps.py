"""`worldmodel first-steps`: a short tour of a model."""

from pathlib import Path

from worldmodel.cli.model import add_device_option, check_model, load_model
from worldmodel.cli.parser import MODEL_HELP, Parser, option
from worldmodel.io import staged_files


def main(argv: list[str]) -> None:
    """Steer, fork, describe and imagine a scene, and write videos of it."""
    parser = Parser(
        "worldmodel first-steps",
        "Steer the scene of first_frame.png by text, fork it, ask about it, generate a scene from a\n"
        "caption, and write videos and contact sheets.",
        "worldmodel first-steps --out outputs/first-steps",
    )
    parser.add_argument("--model", default="shapes-tiny", help=MODEL_HELP)
    option(parser, "--out", "output folder", "outputs/first-steps", metavar="FOLDER")
    add_device_option(parser)
    args = parser.parse_args(argv)
    check_model(args.model)  # before PyTorch is imported, which takes seconds
    from worldmodel.demo.first_steps import first_steps

    with staged_files(args.out) as staged:
        written = first_steps(load_model(args.model, device=args.device), staged)
    print("\nWrote:")
    for name, description in written.items():
        print(f"  {Path(args.out) / name!s:40s} {description}")
