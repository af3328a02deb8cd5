"""Episodes of a Gymnasium environment, played by a policy."""

import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from worldmodel.actions import Action
from worldmodel.errors import InputError, WorldModelError
from worldmodel.media import Frame
from worldmodel.recording.cameras import OBSERVATION, RENDER, Cameras, images_in
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.policies import open_policy
from worldmodel.recording.settings import EnvironmentSettings
from worldmodel.recording.spaces import ActionMapping

MAX_INFO_NUMBERS = 64
"""Longer arrays of an info are left out."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of an action in an environment."""

    observation: Any
    reward: float
    """Sum over the repeated steps."""
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


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
        cameras = settings.cameras or (RENDER if self.env.render_mode else OBSERVATION,)
        self._pictures = Cameras(settings.env_id, cameras, settings.size)
        if settings.fps < 0:
            raise InputError(f"fps is {settings.fps}; use 1 or more, or 0 for that of the environment.")
        fps = settings.fps or self._fps()
        inner: Any = self.env.unwrapped
        details = settings.action_details or getattr(inner, "action_specs", ())
        self.mapping = ActionMapping(self.env.action_space, fps, _value_names(self.env), details)
        self.policy = open_policy(settings.policy, self.env, settings.epsilon)
        self.format = RecordingFormat(fps, self.mapping.specs, settings.as_dict())

    def episode(self, index: int) -> RecordedEpisode:
        """Play an episode.

        Raises:
            InputError: the environment or the policy raises an error, a reward is not a number, or a frame is
                not an image or has another size than the first.
        """
        name = f"episode {index}"
        return self._play(name, self.seed(index), self._begin(index, name), self.settings.max_steps)

    def actions(self, index: int) -> list[Any]:
        """Return the elements of the action space that the policy chooses in an episode."""
        name, taken = f"episode {index}", []
        policy = self._begin(index, name)

        def choose(observation: Any) -> Any:
            taken.append(deepcopy(policy(observation)))
            return taken[-1]

        limit = self.settings.max_steps
        self._play(name, self.seed(index), choose, limit, shown_from=limit + 1)
        return taken

    def future(
        self, index: int, actions: Sequence[Any], shown_from: int, drawn_anew: int | None = None
    ) -> RecordedEpisode:
        """Play an episode again with given elements of the action space, until they or the episode end.

        Args:
            index: The episode, by its seed.
            actions: The actions from its beginning.
            shown_from: The step from which frames are recorded.
            drawn_anew: Seed of the environment's random generator (`Env.np_random`) from that step on; None
                goes on with the episode's own.

        The environment is opened anew: many keep something over a reset, such as the phase of an animation.
        """
        given, name = iter(enumerate(actions)), f"episode {index}, played again"
        generator = f"The random generator (np_random) of {self.settings.env_id}"
        kept, self.env = self.env, _make(self.settings)

        def choose(_: Any) -> Any:
            step, action = next(given)
            if step == shown_from and drawn_anew is not None:
                with _blamed(generator, f"when it was replaced in {name}"):
                    self.env.unwrapped.np_random = np.random.default_rng(drawn_anew)
            return action

        try:
            return self._play(name, self.seed(index), choose, len(actions), shown_from=shown_from)
        finally:
            self.env.close()
            self.env = kept

    def seed(self, index: int) -> int:
        """Return the seed of an episode."""
        return int(np.random.SeedSequence((self.settings.seed, index)).generate_state(1)[0] >> 1)

    def _begin(self, index: int, name: str) -> Callable[[Any], Any]:
        """Return the policy at the beginning of an episode."""
        with _blamed(f"The policy {self.settings.policy!r}", f"at the beginning of {name}"):
            self.policy.reset(self.seed(index))
        return self.policy

    def replay(self, seed: int, actions: Sequence[Any], observations: Sequence[Any]) -> RecordedEpisode:
        """Play recorded elements of the action space, to see what was seen.

        Args:
            seed: Seed of the recorded episode.
            actions: Its actions.
            observations: Its observations, one more.

        Raises:
            InputError: the environment observes something else.
        """
        recorded, seen = iter(actions), enumerate(observations)

        def compare(observation: Any) -> None:
            step, wanted = next(seen)
            if not data_equivalence(observation, wanted):
                raise InputError(
                    f"{self.settings.env_id} does not repeat the recorded episode of seed {seed}: its "
                    f"observation {step} differs; use the version and the arguments of the recording."
                )

        name = f"the episode of seed {seed}"
        episode = self._play(name, seed, lambda _: next(recorded), len(actions), compare)
        if len(episode.actions) != len(actions):
            raise InputError(
                f"{self.settings.env_id} ends the recorded episode of seed {seed} after "
                f"{len(episode.actions)} of {len(actions)} actions; use the version of the recording."
            )
        return episode

    def _play(
        self,
        name: str,
        seed: int,
        choose: Callable[[Any], Any],
        max_steps: int,
        watch: Callable[[Any], None] = lambda _: None,
        shown_from: int = 0,
    ) -> RecordedEpisode:
        """Play an episode, and record it from a step on."""
        env_id = self.settings.env_id
        with _blamed(env_id, f"at the beginning of {name}"):
            observation, info = self._reset(seed)
            frames = [] if shown_from else [self._frames(self.env, observation)]
        watch(observation)
        infos = [] if shown_from else [_plain(info)]
        numbers, rewards, terminated, truncated, steps = [], [], False, False, 0
        while steps < max_steps and not (terminated or truncated):
            steps += 1
            place = f"at step {steps} of {name}"
            action = self._chosen(choose, observation, place)
            with _blamed(env_id, place):
                step = self._step(self.env, action)
            observation, terminated, truncated = step.observation, step.terminated, step.truncated
            watch(observation)
            if not math.isfinite(step.reward):
                raise InputError(
                    f"{env_id} gave the reward {step.reward} {place}; mend the environment, or wrap it so "
                    "that rewards are finite."
                )
            if steps > shown_from:
                numbers.append(self.mapping.numbers(action))
                rewards.append(step.reward)
            if steps >= shown_from:
                with _blamed(env_id, place):
                    frames.append(self._frames(self.env, observation))
                self._check_sizes(frames[0], frames[-1], place)
                infos.append(_plain(step.info))
        text = observation.get("mission", "") if isinstance(observation, Mapping) else ""
        return RecordedEpisode(
            {name: np.stack([frame[name] for frame in frames]) for name in (frames[0] if frames else ())},
            tuple(Action.of_numbers(self.mapping.specs, row) for row in numbers),
            np.array(numbers, np.float32).reshape(len(numbers), len(self.mapping.specs)),
            np.array(rewards, np.float32),
            bool(terminated),
            bool(truncated) or not terminated,  # a policy's last step within max_steps
            seed,
            text if isinstance(text, str) else "",
            tuple(infos),
        )

    def _chosen(self, choose: Callable[[Any], Any], observation: Any, place: str) -> Any:
        """Return the action of a policy."""
        with _blamed(f"The policy {self.settings.policy!r}", place):
            action = choose(observation)
        if not self.env.action_space.contains(action):
            raise InputError(
                f"The policy {self.settings.policy!r} chose {action!r} {place}, which is not in "
                f"{self.env.action_space}; return an element of the action space."
            )
        return action

    def _check_sizes(self, first: Mapping[str, Frame], now: Mapping[str, Frame], place: str) -> None:
        before, after = ({name: frame.shape[:2] for name, frame in each.items()} for each in (first, now))
        if before != after:
            raise InputError(
                f"The frames of {self.settings.env_id} (height, width) are {after} {place}, and the first "
                f"are {before}; pass a size, to which all are resized."
            )

    def reset(self, seed: int) -> Frame:
        """Begin an episode, and return its first frame."""
        return self.frame(self.env, self._reset(seed)[0])

    def _reset(self, seed: int) -> tuple[Any, Mapping[str, Any]]:
        found: Any = self.env.reset(seed=seed)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise InputError(_old_interface(self.settings.env_id, "reset", "(observation, info)"))
        return found

    def advance(self, env: gymnasium.Env, action: Action) -> Step:
        """Carry out a named action, or the actions of a chunk in order, in the environment or a copy of it.

        Raises:
            InputError: the action space has no such action.
        """
        total, step = 0.0, None
        for element in [self.mapping.element(each) for each in action.chunk or (action,)]:
            step = self._step(env, element)
            total += step.reward
            if step.terminated or step.truncated:
                break
        assert step, "a chunk is not empty"
        return replace(step, reward=total)

    def frame(self, env: gymnasium.Env, observation: Any) -> Frame:
        """Return what the first camera shows of the environment or a copy of it."""
        return next(iter(self._frames(env, observation).values()))

    def _step(self, env: gymnasium.Env, element: Any) -> Step:
        total, step = 0.0, None
        for _ in range(self.settings.frame_skip):
            # A copy: some environments scale or clip the action in place, and it is recorded and repeated.
            found: Any = env.step(deepcopy(element))
            if not (isinstance(found, tuple) and len(found) == 5):
                wanted = "(observation, reward, terminated, truncated, info)"
                raise InputError(_old_interface(self.settings.env_id, "step", wanted))
            observation, reward, terminated, truncated, info = found
            total += float(reward)
            step = Step(observation, total, bool(terminated), bool(truncated), info)
            if terminated or truncated:
                break
        assert step, "frame_skip is 1 or more"
        return step

    def close(self) -> None:
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

    def _frames(self, env: gymnasium.Env, observation: Any) -> dict[str, np.ndarray]:
        return self._pictures.frames(observation, env.render)


@contextmanager
def _blamed(who: str, place: str) -> Iterator[None]:
    """Turn an error in code of others into one that says whose it is and where it happened."""
    try:
        yield
    except WorldModelError:
        raise
    # Environments and policies are any code.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"{who} raised {type(error).__name__} ({reason}) {place}; correct it and run the same command "
            "again, which goes on after the episodes that are complete."
        ) from error


def _old_interface(env_id: str, method: str, wanted: str) -> str:
    return (
        f"{env_id} does not return {wanted} from {method}, as environments for Gym before version 0.26 do; "
        "update it, or wrap it with shimmy.GymV21CompatibilityV0."
    )


def _make(settings: EnvironmentSettings) -> gymnasium.Env:
    """Open the environment with frames to render, if it or its observations are recorded."""
    wants_render = any(camera.split(".")[0] == RENDER for camera in settings.cameras)
    # Frames go to files: SDL, with which many environments draw, would complain that there is no screen.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        module, _, name = settings.env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        found = gymnasium.spec(name)
        make = partial(gymnasium.make, found, disable_env_checker=True, **settings.env_args)
        modes, env = _render_modes(found), None
        if modes is None:
            env = make()
            modes = env.metadata.get("render_modes") or ()
        mode = "rgb_array" if "rgb_array" in modes and (wants_render or not settings.cameras) else None
        if env is None:
            env = make(render_mode=mode)
        elif mode and env.render_mode != mode:
            env.close()
            env = make(render_mode=mode)
    except InputError:
        raise
    # Unknown names, missing packages and wrong arguments raise many types.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{settings.env_id!r} cannot be opened: {reason.rstrip('.')}; an environment of another package "
            "is named module:ID, for example minigrid:MiniGrid-Empty-5x5-v0."
        ) from None
    if wants_render and "rgb_array" not in modes:
        env.close()
        raise InputError(
            f"{settings.env_id} renders {', '.join(map(str, modes)) or 'nothing'} and not rgb_array; "
            "record the camera observation if its observations are images."
        )
    if (
        env.render_mode is None
        and not settings.cameras
        and not list(images_in(OBSERVATION, env.observation_space.sample()))
    ):
        env.close()
        raise InputError(
            f"{settings.env_id} does not render rgb_array and its observations are {env.observation_space}, "
            "not images; wrap it so that one of them is."
        )
    return env


def _render_modes(found: Any) -> Sequence[str] | None:
    """Return the modes that the class of an environment states; None if only the environment itself does."""
    from gymnasium.envs.registration import load_env_creator

    entry = found.entry_point
    maker = load_env_creator(entry) if isinstance(entry, str) else entry
    metadata = getattr(maker, "metadata", None)  # a function has none, and a wrapper a property
    return metadata.get("render_modes") or () if isinstance(metadata, Mapping) else None


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
