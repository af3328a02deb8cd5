"""Model loading for verbs."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from worldmodel.cli.parser import option
from worldmodel.errors import InputError

if TYPE_CHECKING:
    from worldmodel.models.world_model import WorldModel
    from worldmodel.rollout import Session


def load_model(
    name: str,
    options: argparse.Namespace | None = None,
    base: str | None = None,
    device: str | None = None,
) -> "WorldModel":
    """Load a model by name or path, prepared by the options of `add_inference_options`.

    `base` is the folder of its base language model, if it has one that is not found otherwise; `device` is
    what `add_device_option` reads.

    Raises:
        ModelError: there is no such model, or its files are damaged.
        ConfigError: an option is out of range, or the device is not available.
    """
    check_model(name)  # before PyTorch is imported, which takes seconds
    from worldmodel.models.world_model import WorldModel

    quiet_transformers()
    model = WorldModel.from_pretrained(name, device=chosen_device(device), base=base)
    if options is not None:
        from worldmodel.models.inference import optimize

        optimize(model, options.cache_threshold, options.quantization, options.compile)
    return model


def check_model(name: str) -> None:
    """Raise `ModelError` if there is no model of this name, unless it may be on the Hub; imports no torch."""
    from worldmodel.models.loading import location

    if not location.is_repository(name):
        location.resolve(name)


def check_files(*paths: str | None) -> None:
    """Raise `InputError` if a file does not exist; None: it was not given. Imports no torch."""
    for path in paths:
        # A URL has a message of its own, when it is read.
        if path is not None and "://" not in path and not os.path.exists(os.path.expanduser(path)):
            raise InputError(f"There is no file {path!r}; check the path.")


def add_device_option(parser: "argparse._ActionsContainer") -> None:
    """Add the option that says where a model runs, with the default of every verb."""
    option(parser, "--device", "device of the model, for example cpu or cuda (default: cuda if available)")


def chosen_device(name: str | None) -> str:
    """Return the device of `--device`, or the default: CUDA where it is available."""
    import torch

    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def add_base_option(parser: "argparse._ActionsContainer") -> None:
    """Add the option that says where the base language model of a model is."""
    option(
        parser,
        "--base",
        "folder of the base language model that the model refers to, if it is not found otherwise; needed "
        "once, then the merged weights are in the cache",
        metavar="FOLDER",
    )


def add_observation_option(parser: "argparse._ActionsContainer") -> None:
    """Add the option that refuses pictures which are unlike what the model knows."""
    option(
        parser,
        "--max-observation-score",
        "refuse an observation that is less like what the model knows than this: 1 is the limit of held-out "
        "frames (default: a warning above 1)",
        kind=float,
    )


def check_observation(session: "Session", limit: float | None = None) -> None:
    """Warn where the picture that a session starts from is unlike what its model knows.

    Raises:
        ConfigError: the limit is not above 0.
        InputError: it is less like that than the limit.
    """
    from worldmodel.rollout.observation_score import check_score, warning

    score = session.observation_score()
    check_score(score, limit)
    if words := warning(score):
        print(f"warning: {words}", file=sys.stderr)


def add_inference_options(group: "argparse._ActionsContainer") -> None:
    """Add the options that make inference cheaper."""
    option(
        group,
        "--cache-threshold",
        "reuse the generator's prediction while it changes by less than this share, 0.05 for example; "
        "0 computes every step (default: the model's)",
        kind=float,
    )
    option(
        group,
        "--quantization",
        "weights of backbone and generator in 8 bits: int8 or fp8; with vLLM, a method of its own",
        metavar="METHOD",
    )
    group.add_argument(
        "--compile", action="store_true", help="compile the generator's transformer blocks (torch.compile)"
    )


def quiet_transformers() -> None:
    """Disable the progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
