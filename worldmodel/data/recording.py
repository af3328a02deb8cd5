"""Metadata of a recording: its frame rate, and the meaning of its actions."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from worldmodel.actions import action_kind, specs_by_kind
from worldmodel.config import ActionConfig, ActionSpec, WorldModelConfig
from worldmodel.errors import ConfigError

VECTOR = "vector"
RATE_TOLERANCE = 1e-4
"""Share by which rates of actions may differ: they are written with a few digits."""


def read_recording(folder: str | Path) -> tuple[tuple[ActionSpec, ...], int] | None:
    """Return the action spec and the frame rate that `worldmodel record` stores beside a table, if it did.

    Raises:
        ConfigError: they cannot be read.
    """
    file = Path(folder, "recording.json").expanduser()
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        specs, fps = tuple(map(ActionSpec.of, recorded["action_spec"])), float(recorded["fps"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read ({type(error).__name__}: {error}).") from None
    return specs, whole_fps(fps, repr(str(file)))


def renamed(specs: Sequence[ActionSpec], numbers: Sequence[str]) -> list[ActionSpec]:
    """Return specs whose numbers of vectors have the names `numbers`; an empty one leaves a number out."""
    given, found = iter(numbers), []
    for spec in specs:
        name = next(given, "") if numbers and spec.field == VECTOR else spec.name
        found += [replace(spec, name=name)] if name else []
    return found


def vector_names(
    key: str, specs: Sequence[ActionSpec], numbers: Sequence[str], takes: ActionConfig
) -> tuple[str, ...]:
    """Return the names of the numbers of a source's vectors; nothing where they are those of the model.

    Args:
        key: config key of the source, for messages.
        specs: what a recording states, or nothing.
        numbers: `data.sources.NAME.numbers`.
        takes: the actions that the model takes.

    Raises:
        ConfigError: there is not a name for each number, the model does not know one, or has no names.
    """
    settings, stated = takes.vector, [spec.name for spec in specs if spec.field == VECTOR]
    if numbers and not (settings and settings.names):
        raise ConfigError(f"{key}.numbers needs names in model.action.vector, which has none; add them.")
    if numbers and stated and len(numbers) != len(stated):
        raise ConfigError(f"{key}.numbers has {len(numbers)} names; use {len(stated)}, one for each number.")
    if not (settings and settings.names):
        return ()
    names = tuple(numbers or stated)
    action_kind(VECTOR).check_specs(key, [ActionSpec(name) for name in names if name], settings)
    return () if names == settings.names else names


def is_whole(fps: float) -> bool:
    """Return whether a frame rate counts as a whole number: 29.97, and all within half a percent of one."""
    whole = round(fps) if math.isfinite(fps) else 0
    return whole >= 1 and abs(fps - whole) <= 0.005 * whole


def whole_fps(fps: float, key: str) -> int:
    """Return a frame rate as a whole number: 30 for 29.97, and for all within half a percent of it.

    Raises:
        ConfigError: it is another fraction, or not above 0; the message begins with `key`.
    """
    if not is_whole(fps):
        raise ConfigError(
            f"{key} has {fps:g} frames per second, and a model a whole number of them; record it again, or "
            "encode its videos and write its tables anew, at a whole number."
        )
    return round(fps)


def check_specs(key: str, specs: Sequence[ActionSpec], model: WorldModelConfig) -> None:
    """Check that a model takes the actions of a dataset: their rate, names and bounds.

    Raises:
        ConfigError: it does not; the message has the settings with which it does.
    """
    takes = model.action
    taken = [spec for spec in specs if takes.takes[spec.field]]
    for kind, own in specs_by_kind(taken):
        kind.check_specs(key, own, takes.kinds[kind.name])
    known = {spec.name: spec for spec in takes.spec}
    for spec in taken:
        other = known.get(spec.name, spec)
        for field in ("unit", "scale", "frame"):
            if getattr(other, field) != getattr(spec, field):
                raise ConfigError(
                    f"{key} has {spec.name} with {field} {getattr(spec, field)!r}, and the model with "
                    f"{getattr(other, field)!r}; convert the dataset, or train another model."
                )
    rates = {spec.rate for spec in taken if spec.rate}
    taken_s = model.fps / model.action_frames
    if rates and any(abs(rate - taken_s) > RATE_TOLERANCE * taken_s for rate in rates):
        rate = max(rates)
        fps, per_round = rate * model.action_frames, rate * model.chunk_frames / model.fps
        fits = is_whole(per_round) and model.chunk_frames % round(per_round) == 0
        remedies = [f"model.action.per_round to {round(per_round)}"] if fits else []
        remedies += [f"model.fps to {round(fps)}"] if is_whole(fps) else []
        raise ConfigError(
            f"{key} has {rate:g} actions per second, and the model takes {taken_s:g}, {takes.per_round} per "
            f"round; set {' or '.join(remedies) or 'model.fps and model.chunk_frames'} so that they agree."
        )
