"""Callbacks of a run: code of a user that is called between steps, without editing the trainer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from worldmodel.config import TrainConfig
from worldmodel.config.imports import check_arguments, find_extension
from worldmodel.errors import ConfigError

if TYPE_CHECKING:
    from worldmodel.train.trainer import StepResult, Trainer


class Callback:
    """What is called in every process between the steps of a stage.

    Override the methods you need. A callback may read weights, gradients are gone. Processes wait for each
    other in the next step, so a collective in a callback must run on all of them.
    """

    def on_stage_begin(self, trainer: "Trainer", step: int) -> None:
        """Called before the first step of a stage; `step` is above 0 if the stage is resumed."""

    def on_step_end(self, trainer: "Trainer", step: int, result: "StepResult") -> None:
        """Called after step `step`, counted from 0, with its losses over all processes."""

    def on_stage_end(self, trainer: "Trainer") -> None:
        """Called after the last step of a stage, with the weights that it ends with."""


def callback_classes(config: TrainConfig) -> dict[str, type[Callback]]:
    """Return the classes that `callbacks` names.

    Raises:
        ConfigError: one cannot be imported, is not a subclass of `Callback`, or does not take its arguments.
    """
    found = {}
    for name, arguments in config.callbacks.items():
        each = find_extension("callbacks", name, "worldmodel.callbacks", {})
        if not (isinstance(each, type) and issubclass(each, Callback)):
            raise ConfigError(
                f"callbacks has {name!r}, which is not a subclass of "
                "worldmodel.train.run.callbacks.Callback; derive it from that class."
            )
        check_arguments(f"callbacks.{name}", each, 0, arguments)
        found[name] = each
    return found


def build_callbacks(config: TrainConfig) -> Sequence[Callback]:
    """Build the callbacks of a run, in the order of the config."""
    return [each(**config.callbacks[name]) for name, each in callback_classes(config).items()]
