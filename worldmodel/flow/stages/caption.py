"""The stage `caption`: descriptions of clips by a vision language model."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal, get_args

import pyarrow as pa

from worldmodel import media
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.captions.answers import Answers
from worldmodel.flow.captions.endpoint import Endpoint, UnavailableError
from worldmodel.flow.captions.prompts import PROMPTS, Caption
from worldmodel.flow.captions.strategies import View, by_differences, by_grid, by_video
from worldmodel.flow.stages.base import DROP, RETRY, RETRY_AFTER, Resources, stage
from worldmodel.flow.stages.rows import Row, interval, result_of

Strategy = Literal["grid", "video", "differential"]
EVENT = pa.struct(
    {
        "start": pa.float64(),
        "end": pa.float64(),
        "text": pa.string(),
        "actor": pa.string(),
        "action": pa.string(),
    }
)
OUTPUTS = pa.schema({"caption": pa.string(), "events": pa.list_(EVENT), "camera_motion": pa.string()})
UNCOUNTED = (
    "endpoint", "api_key_variable", "max_in_flight", "retries", "retry_delay_s", "timeout_s", "answers",
    "budget_tokens", "budget_requests",
)  # fmt: skip


@stage(
    version="1",
    inputs=["video", "duration_s", "start_s", "end_s"],
    outputs=OUTPUTS.names,
    uncounted=UNCOUNTED,
    resources=Resources(cpu=1.0, memory_gb=2.0),
    batch_size=16,
    timeout_s=3600.0,
    name="caption",
)
class Captioner:
    """Describes clips; those whose requests fail are tried again, after their finished requests.

    Args:
        endpoint: base URL of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`.
        model: name of the model there.
        strategy: `grid` shows all frames as one image; `video` sends a video; `differential` asks for the
            first frame, then for what changed between keyframes, and then for a summary.
        prompt_version: which prompts; a released version does not change.
        num_frames: frames of a clip for `grid`, evenly in time.
        interval_s: time between frames for `video` and `differential`, which shows those that differ.
        max_frames: frames at most for `video` and `differential`; longer clips are looked at less often.
        min_change: how much a keyframe differs from the one before, from 0 to 1.
        max_side: pixels along the longer side of a frame.
        max_tokens: length of an answer; 0 leaves it to the endpoint.
        api_key_variable: name of the environment variable with the key of the endpoint.
        max_in_flight: clips that are described at the same time.
        retries: further attempts at a request after an error of the endpoint or an unusable answer.
        retry_delay_s: pause before the first of them; it doubles with each.
        timeout_s: how long one request may take.
        answers: database of finished requests, `sqlite:///FILE` or `postgresql://…` for several machines.
        budget_tokens: tokens after which the flow ends, counted in `answers`; 0 sets no limit.
        budget_requests: likewise requests.

    Raises:
        ConfigError: a setting is wrong, or the variable of the key is not set.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        model: str,
        strategy: Strategy = "grid",
        prompt_version: str = "1",
        num_frames: int = 16,
        interval_s: float = 2.0,
        max_frames: int = 32,
        min_change: float = 0.03,
        max_side: int = 512,
        max_tokens: int = 1024,
        api_key_variable: str = "",
        max_in_flight: int = 8,
        retries: int = 6,
        retry_delay_s: float = 1.0,
        timeout_s: float = 120.0,
        answers: str = "sqlite:///runs/caption_answers.db",
        budget_tokens: int = 0,
        budget_requests: int = 0,
    ) -> None:
        _check(strategy, prompt_version, endpoint, api_key_variable)
        least = {"num_frames": num_frames, "max_frames": max_frames, "max_in_flight": max_in_flight}
        for name, value in least.items():
            if value < 1:
                raise ConfigError(f"caption.{name} is {value}; use 1 or more.")
        if interval_s <= 0 or timeout_s <= 0 or max_side < 32:
            raise ConfigError(
                f"caption has interval_s {interval_s:g}, timeout_s {timeout_s:g} and max_side {max_side}; "
                "use above 0, above 0, and 32 or more."
            )
        self.prompts, self.strategy, self.min_change = PROMPTS[prompt_version], strategy, min_change
        self.num_frames, self.interval_s, self.max_frames = num_frames, interval_s, max_frames
        self.max_side = max_side
        store = Answers(answers, budget_tokens, budget_requests)
        key = os.environ.get(api_key_variable, "")
        self.endpoint = Endpoint(endpoint, model, store, key, max_tokens, retries, retry_delay_s, timeout_s)
        self.pool = ThreadPoolExecutor(max_in_flight, "caption")

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Describe the clips of a batch."""
        return result_of(batch, OUTPUTS, list(self.pool.map(self._row, batch.to_pylist())))

    def _row(self, clip: Row) -> Row:
        try:
            found = self._describe(self._view(clip))
        except UnavailableError as error:
            return {RETRY: str(error), RETRY_AFTER: error.retry_after_s}
        except InputError as error:
            return {DROP: str(error)}
        return {"caption": found.caption, "events": found.events, "camera_motion": found.camera_motion}

    def _describe(self, view: View) -> Caption:
        by = {
            "grid": by_grid,
            "video": by_video,
            "differential": functools.partial(by_differences, min_change=self.min_change),
        }
        return by[self.strategy](view, self.prompts, self.endpoint)

    def _view(self, clip: Row) -> View:
        """Return the frames of a clip that the strategy needs."""
        video = clip["video"]
        if video is None:
            raise InputError("The clip has no video.")
        start, end = interval(clip)
        duration_s = clip["duration_s"]
        if end is None and duration_s is None:
            duration_s = media.probe(video, decode=False).duration_s
        length_s = max(0.0, (duration_s if end is None else end) - start)
        count = self.num_frames
        if self.strategy != "grid":
            count = min(self.max_frames, max(1, round(length_s / self.interval_s)))
        fps = count / length_s if length_s else None
        found = list(islice(media.sample_frames(video, fps, self.max_side, start, end), count))
        if not found:
            raise InputError(f"The clip has no frame from {start:g} s on.")
        times, frames = zip(*found, strict=True)
        return View(frames, [time - start for time in times], length_s)


def _check(strategy: str, prompt_version: str, endpoint: str, api_key_variable: str) -> None:
    if strategy not in get_args(Strategy):
        raise ConfigError(f"caption.strategy is {strategy!r}; use {', '.join(get_args(Strategy))}.")
    if prompt_version not in PROMPTS:
        raise ConfigError(f"caption.prompt_version is {prompt_version!r}; use one of {', '.join(PROMPTS)}.")
    if strategy == "differential" and not PROMPTS[prompt_version].structured:
        raise ConfigError(f"The prompts {prompt_version!r} of caption have no differences; use '1'.")
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"caption.endpoint is {endpoint!r}; use a URL such as http://127.0.0.1:8000/v1.")
    if api_key_variable and not os.environ.get(api_key_variable):
        raise ConfigError(f"The variable {api_key_variable} is not set; caption takes its key from it.")
