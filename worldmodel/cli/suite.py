"""Options of `worldmodel eval` and `worldmodel publish` for recorded episodes, and their suite."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from worldmodel.cli.parser import option
from worldmodel.errors import InputError

if TYPE_CHECKING:
    from worldmodel.config import WorldModelConfig
    from worldmodel.eval.data.suite import DataSettings, DataSuite
    from worldmodel.eval.suite import EvalSettings, EvalSuite

NEED_DATA = ("train_data", "inverse", "judge", "perceptual", "features")
"""Options that are only for recorded episodes."""


def add_data_options(parser: ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("recorded episodes")
    option(
        group,
        "--data",
        "evaluate on held-out episodes: a LeRobot dataset, of which those of `worldmodel data split` "
        "are taken; a table of clips or a folder with one; KIND:PATH for other kinds of data.sources; CONFIG "
        "for its validation.source, or CONFIG:NAME for a source of it",
        metavar="SOURCE",
    )
    option(
        group,
        "--train-data",
        "episodes, other than those of --data, on which an inverse-dynamics model is trained that reads "
        "actions from frames (default: the training part of a divided LeRobot dataset; with CONFIG, its "
        "source of the highest weight; otherwise none)",
        metavar="SOURCE",
    )
    option(
        group, "--inverse-dynamics-steps", "training steps of the inverse-dynamics model; 0 trains none", 500
    )
    option(
        group,
        "--inverse",
        "two actions that undo each other, for example left=right; measures the return to the start; "
        "may be repeated",
        metavar="A=B",
        repeated=True,
    )
    option(
        group,
        "--judge",
        "class of a judge (worldmodel.eval.judge.Judge) that compares a frame with the recorded one",
        metavar="MODULE:CLASS",
    )
    option(
        group, "--perceptual", "safetensors file of LPIPS, for a learned perceptual distance", metavar="FILE"
    )
    option(
        group,
        "--features",
        "folder of a vision encoder (DINOv2, CLIP, ...), for a Fréchet distance over its features",
        metavar="FOLDER",
    )


def chosen_suite(
    args: Namespace, config: "WorldModelConfig", settings: "EvalSettings"
) -> "tuple[EvalSettings, EvalSuite]":
    """Return the settings and the suite of an evaluation: that of the model's world, or of recorded episodes.

    Raises:
        InputError: An option is wrong, or the episodes do not fit the model.
        ConfigError: The source cannot be opened.
    """
    if args.data is None:
        from worldmodel.worlds import suite_of

        for name in NEED_DATA:
            if getattr(args, name):
                raise InputError(f"--{name.replace('_', '-')} needs recorded episodes; pass --data SOURCE.")
        return settings, suite_of(config)
    if settings.split is not None:
        raise InputError("--split is for the suite of a world; leave it out with --data.")
    from worldmodel.eval.data.suite import DataSettings

    given = {name: getattr(args, name) for name in ("data", "inverse_dynamics_steps", *NEED_DATA)}
    own = DataSettings(**asdict(settings), **{**given, "inverse": tuple(args.inverse)})
    return own, data_suite(own, config)


def data_suite(settings: "DataSettings", config: "WorldModelConfig") -> "DataSuite":
    """Return the suite of recorded episodes, checked against the model; for errors see `chosen_suite`."""
    from worldmodel.data.argument import read_held_out
    from worldmodel.eval.data.suite import DataSuite
    from worldmodel.eval.judge import load_judge

    held_out, training = read_held_out(settings.data, settings.train_data)
    judge = None if settings.judge is None else load_judge(settings.judge)
    suite = DataSuite(held_out, training, config, settings, judge)
    suite.check(config)
    return suite
