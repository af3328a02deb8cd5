"""Options of `worldmodel eval` and `worldmodel publish` for recorded episodes."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from worldmodel.errors import InputError

if TYPE_CHECKING:
    from worldmodel.config import WorldModelConfig
    from worldmodel.eval.data.suite import DataSettings, DataSuite
    from worldmodel.eval.suite import EvalSettings

NEED_DATA = ("train_data", "inverse", "judge", "perceptual", "features")
"""Options that are only for recorded episodes."""


def add_data_options(parser: ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("recorded episodes")
    group.add_argument(
        "--data",
        metavar="SOURCE",
        help="evaluate on held-out episodes: a LeRobot dataset, of which those of `worldmodel data split` "
        "are taken; a table of clips or a folder with one; KIND:PATH for other kinds of data.sources; CONFIG "
        "for its validation.source, or CONFIG:NAME for a source of it",
    )
    group.add_argument(
        "--train-data",
        metavar="SOURCE",
        help="episodes, other than those of --data, on which an inverse-dynamics model is trained that reads "
        "actions from frames (default: the training part of a divided LeRobot dataset; with CONFIG, its "
        "source of the highest weight; otherwise none)",
    )
    group.add_argument(
        "--inverse-dynamics-steps",
        type=int,
        default=500,
        metavar="N",
        help="training steps of the inverse-dynamics model; 0 trains none (default: %(default)s)",
    )
    group.add_argument(
        "--inverse",
        action="append",
        default=[],
        metavar="A=B",
        help="two actions that undo each other, for example left=right; measures the return to the start; "
        "may be repeated",
    )
    group.add_argument(
        "--judge",
        metavar="MODULE:CLASS",
        help="class of a judge (worldmodel.eval.judge.Judge) that compares a frame with the recorded one",
    )
    group.add_argument(
        "--perceptual", metavar="FILE", help="safetensors file of LPIPS, for a learned perceptual distance"
    )
    group.add_argument(
        "--features",
        metavar="FOLDER",
        help="folder of a vision encoder (DINOv2, CLIP, ...), for a Fréchet distance over its features",
    )


def check_options(args: Namespace) -> None:
    """Check that no option needs recorded episodes.

    Raises:
        InputError: One does.
    """
    for name in NEED_DATA:
        if getattr(args, name):
            raise InputError(f"--{name.replace('_', '-')} needs recorded episodes; pass --data SOURCE.")


def data_suite(
    args: Namespace, config: "WorldModelConfig", settings: "EvalSettings"
) -> "tuple[DataSettings, DataSuite]":
    """Return the settings and the suite of an evaluation on recorded episodes, checked against the model.

    Raises:
        InputError: An option is wrong, or the episodes do not fit the model.
        ConfigError: The source cannot be opened.
    """
    from worldmodel.data.argument import read_held_out
    from worldmodel.eval.data.suite import DataSettings, DataSuite
    from worldmodel.eval.judge import load_judge

    if settings.split is not None:
        raise InputError("--split is for the suite of a world; leave it out with --data.")
    held_out, training = read_held_out(args.data, args.train_data)
    judge = None if args.judge is None else load_judge(args.judge)
    own = DataSettings(
        **asdict(settings),
        data=args.data,
        train_data=args.train_data,
        inverse_dynamics_steps=args.inverse_dynamics_steps,
        inverse=tuple(args.inverse),
        judge=args.judge,
        perceptual=args.perceptual,
        features=args.features,
    )
    suite = DataSuite(held_out, training, config, own, judge)
    suite.check(config)
    return own, suite
