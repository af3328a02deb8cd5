"""Options of the verbs that play in a real environment, as it was recorded."""

import argparse
from argparse import Namespace
from typing import TYPE_CHECKING

from worldmodel.cli.parser import option
from worldmodel.cli.record import env_arg
from worldmodel.config import ImageSize

if TYPE_CHECKING:
    from worldmodel.recording.environment import EnvironmentEpisodes


def add_environment_options(group: "argparse._ActionsContainer") -> None:
    """Add what `open_environment` reads, except for `--env` itself."""
    option(group, "--env-arg", "argument of the environment", metavar="KEY=VALUE", repeated=True)
    option(group, "--frame-skip", "steps per action, as it was recorded", 1)
    option(
        group,
        "--camera",
        "what the model sees, as it was recorded: render, observation or observation.NAME",
        metavar="NAME",
        repeated=True,
    )
    option(group, "--max-steps", "longest episode", 100)


def open_environment(args: Namespace, size: ImageSize) -> "EnvironmentEpisodes":
    """Open the environment, with frames of a model's size."""
    from worldmodel.recording.environment import EnvironmentEpisodes
    from worldmodel.recording.settings import EnvironmentSettings

    return EnvironmentEpisodes(
        EnvironmentSettings(
            args.env,
            max_steps=args.max_steps,
            size=size,
            frame_skip=args.frame_skip,
            cameras=tuple(args.camera),
            env_args=dict(map(env_arg, args.env_arg)),
        )
    )
