"""Episodes of a Gymnasium environment, played by a policy."""

import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

from worldmodel.errors import InputError
from worldmodel.media import crop_and_resize
from worldmodel.types import Action
from worldmodel.worlds.recorder.episode import RecordedEpisode, RecordingFormat
from worldmodel.worlds.recorder.policies import open_policy
from worldmodel.worlds.recorder.settings import EnvironmentSettings
from worldmodel.worlds.recorder.spaces import ActionMapping

RENDER, OBSERVATION = "render", "observation"
"""Cameras: the picture that the environment renders, and the images in its observations."""
MAX_INFO_NUMBERS = 64
"""Longer arrays of an info are left out."""


class EnvironmentEpisodes:
    """Plays episodes of one environment.

    Raises:
        InputError: the environment cannot be opened, renders no image, has an action space without a
            mapping, or a setting is out of range.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        if settings.frame_skip < 1 or settings.max_steps < 1:
            raise InputError(
                f"frame_skip is {settings.frame_skip} and max_steps {settings.max_steps}; use 1 or more."
            )
        self.settings = settings
        self.env = _make(settings)
        self.cameras = settings.cameras or (RENDER if self.env.render_mode else OBSERVATION,)
        fps = settings.fps or self._fps()
        self.mapping = ActionMapping(
            self.env.action_space, fps, _value_names(self.env), settings.action_details
        )
        self.policy = open_policy(settings.policy, self.env.action_space, settings.epsilon)
        plain = json.loads(json.dumps(asdict(settings)))
        self.format = RecordingFormat(fps, self.mapping.specs, plain)

    def episode(self, index: int) -> RecordedEpisode:
        """Play an episode.

        Raises:
            InputError: a reward is not a number, or a frame is not an image.
        """
        settings = self.settings
        seed = int(np.random.SeedSequence((settings.seed, index)).generate_state(1)[0] >> 1)
        observation, info = self.env.reset(seed=seed)
        self.policy.reset(seed)
        frames, infos = [self._frames(observation)], [_plain(info)]
        numbers, rewards, terminated, truncated = [], [], False, False
        while len(rewards) < settings.max_steps and not (terminated or truncated):
            action, total = self.policy(observation), 0.0
            if not self.env.action_space.contains(action):
                raise InputError(
                    f"The policy {settings.policy!r} chose {action!r}, which is not in "
                    f"{self.env.action_space}; return an element of the action space."
                )
            for _ in range(settings.frame_skip):
                observation, reward, terminated, truncated, info = self.env.step(action)
                total += float(reward)
                if terminated or truncated:
                    break
            if not math.isfinite(total):
                raise InputError(
                    f"{settings.env_id} gave the reward {total} at step {len(rewards) + 1} of episode "
                    f"{index}; mend the environment, or wrap it so that rewards are finite."
                )
            frames.append(self._frames(observation))
            infos.append(_plain(info))
            numbers.append(self.mapping.numbers(action))
            rewards.append(total)
        text = observation.get("mission", "") if isinstance(observation, Mapping) else ""
        return RecordedEpisode(
            {name: np.stack([frame[name] for frame in frames]) for name in frames[0]},
            tuple(Action.of_numbers(self.mapping.specs, row) for row in numbers),
            np.stack(numbers),
            np.array(rewards, np.float32),
            bool(terminated),
            bool(truncated) or not terminated,  # a policy's last step within max_steps
            seed,
            text if isinstance(text, str) else "",
            tuple(infos),
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _fps(self) -> int:
        rate, skip = self.env.metadata.get("render_fps"), self.settings.frame_skip
        if not rate:
            raise InputError(
                f"{self.settings.env_id} states no frame rate (metadata render_fps); pass fps, the number of "
                "recorded steps in a second."
            )
        if rate % skip:
            raise InputError(
                f"{self.settings.env_id} runs at {rate:g} steps per second, which frame_skip {skip} does not "
                "divide; use a divisor, or pass fps."
            )
        return int(rate // skip)

    def _frames(self, observation: Any) -> dict[str, np.ndarray]:
        frames: dict[str, np.ndarray] = {}
        for camera in self.cameras:
            picture = self._picture(camera, observation)
            # A mapping may also hold what is no image.
            images = list(_images(camera, picture)) if isinstance(picture, Mapping) else [(camera, picture)]
            if not images:
                raise InputError(
                    f"The camera {camera!r} of {self.settings.env_id} has no image; name another."
                )
            frames |= {name: self._frame(name, image) for name, image in images}
        return frames

    def _picture(self, camera: str, observation: Any) -> Any:
        first, *path = camera.split(".")
        picture = self.env.render() if first == RENDER else observation
        if first not in (RENDER, OBSERVATION):
            raise InputError(f"There is no camera {camera!r}; use render, observation or observation.NAME.")
        for name in path:
            if not isinstance(picture, Mapping) or name not in picture:
                has = (
                    f"it has {', '.join(map(str, picture))}"
                    if isinstance(picture, Mapping)
                    else "it has no parts"
                )
                raise InputError(f"The camera {camera!r} is not in the {first}; {has}.")
            picture = picture[name]
        return picture

    def _frame(self, name: str, image: Any) -> np.ndarray:
        image = np.asarray(image)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            shape = f"{image.dtype} values of shape {list(image.shape)}"
            raise InputError(
                f"The camera {name!r} of {self.settings.env_id} gives {shape}, not an image; record the "
                "camera render, or an observation of uint8 [height, width, 3]."
            )
        if self.settings.size is not None:
            return crop_and_resize(Image.fromarray(image), self.settings.size)
        height, width = image.shape[:2]  # H.264 needs even sides
        return np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _make(settings: EnvironmentSettings) -> gymnasium.Env:
    """Open the environment with frames to render, if it or its observations are recorded."""
    try:
        module, _, name = settings.env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        found = gymnasium.spec(name)
        modes = _render_modes(found)
        wants_render = any(camera.split(".")[0] == RENDER for camera in settings.cameras)
        if wants_render and "rgb_array" not in modes:
            raise InputError(
                f"{settings.env_id} renders {', '.join(map(str, modes)) or 'nothing'} and not rgb_array; "
                "record the camera observation if its observations are images."
            )
        mode = "rgb_array" if "rgb_array" in modes and (wants_render or not settings.cameras) else None
        env = gymnasium.make(found, render_mode=mode, disable_env_checker=True, **settings.env_args)
    except InputError:
        raise
    # Unknown names, missing packages and wrong arguments raise many types.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{settings.env_id!r} cannot be opened: {reason.rstrip('.')}; an environment of another package "
            "is named module:ID, for example minigrid:MiniGrid-Empty-5x5-v0."
        ) from None
    if (
        mode is None
        and not settings.cameras
        and not list(_images(OBSERVATION, env.observation_space.sample()))
    ):
        env.close()
        raise InputError(
            f"{settings.env_id} does not render rgb_array and its observations are {env.observation_space}, "
            "not images; wrap it so that one of them is."
        )
    return env


def _render_modes(found: Any) -> Sequence[str]:
    from gymnasium.envs.registration import load_env_creator

    entry = found.entry_point
    maker = load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(maker, "metadata", {}).get("render_modes") or ()


def _images(camera: str, picture: Any) -> Iterator[tuple[str, Any]]:
    """Yield the images of a camera: the picture itself, or those in a mapping of pictures."""
    if isinstance(picture, Mapping):
        for name, part in picture.items():
            yield from _images(f"{camera}.{name}", part)
    elif np.ndim(picture) == 3 and np.shape(picture)[2] == 3:
        yield camera, picture


def _value_names(env: gymnasium.Env) -> list[str]:
    """Return the names that an environment has for the values of a Discrete action space."""
    inner: Any = env.unwrapped
    meanings: Any = getattr(inner, "get_action_meanings", None)
    if callable(meanings):
        names: Any = meanings()
        return [str(name) for name in names]
    members = getattr(getattr(inner, "actions", None), "__members__", {})
    return [name for name, _ in sorted(members.items(), key=lambda item: int(item[1]))] if members else []


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an info that JSON can hold."""
    plain: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist() if value.size <= MAX_INFO_NUMBERS else None
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            continue
        if value is not None and len(text) <= 4096:
            plain[str(name)] = json.loads(text)
    return plain
