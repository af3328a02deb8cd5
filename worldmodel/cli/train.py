"""`worldmodel train`: train or fine-tune a model."""

import os

from worldmodel import config as configs
from worldmodel.cli.parser import OVERRIDES_HELP, Parser


def main(argv: list[str]) -> None:
    """Train the stages of a configuration, or continue a run from its newest checkpoint."""
    parser = Parser(
        "worldmodel train",
        "Train a model, stage by stage. Running the same command again resumes from the newest\n"
        "checkpoint, on any number of processes.",
        "worldmodel train shapes_tiny run_dir=runs/mine stages.codec.steps=100\n"
        "  worldmodel train own_clips data.sources.mine.path=clips/clips.jsonl  fine-tune the shipped model\n"
        "  torchrun --nproc-per-node 2 -m worldmodel train shapes_tiny",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a YAML file, or the name of a shipped config (see `worldmodel config`)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="cuda takes one GPU for each process (default: cuda if available)",
    )
    args = parser.parse_args(argv)
    configs.load(args.config, args.overrides)  # before PyTorch is imported, which takes seconds
    if args.device == "cpu":  # read when PyTorch first looks for GPUs, here and in processes that are started
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif args.device == "cuda":
        from worldmodel.models.loading.model_folder import available_device

        available_device(args.device)

    from worldmodel.cli.model import quiet_transformers
    from worldmodel.train import finetune

    quiet_transformers()  # the log of a run has bars of its own
    finetune.main([args.config, *args.overrides])
