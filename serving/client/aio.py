"""Asyncio client, and the one definition of every call; `client.py` derives the blocking client from it."""

import base64
import io
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack
from urllib.parse import quote

import httpx
import numpy as np
from PIL import Image

from worldmodel.actions import Action, AnyAction
from worldmodel.episodes import Outcome, StartImage, StepResult
from worldmodel.errors import InputError
from worldmodel.io import atomic_file
from worldmodel.media import Frames
from worldmodel.serving.client.errors import VideoFailedError
from worldmodel.serving.client.payloads import Observation, as_json, as_upload, drop_none, read_file
from worldmodel.serving.client.transport import HttpApi, ReceivedFrames, parse
from worldmodel.serving.errors import ApiError, NotFoundError
from worldmodel.serving.protocol import ModelObject, Variant, VideoError, VideoObject, WorldObject

BASE_URL = "http://127.0.0.1:8000"
CLIP_FPS = 8.0
"""Frame rate assumed for a clip in memory when `fps` is not given."""
POLL_S = 1.0


class Options(TypedDict, total=False):
    """Settings of generation; those that are left out take the defaults of the model."""

    model: str | None
    """Name of a model of the server or of an adapter."""
    seed: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    negative_prompt: str | None
    """Text that guidance leads away from, for models whose generator reads text."""
    temperature: float | None
    """Of the choice between possible futures; 0 takes the most likely."""
    top_k: int | None
    """Only so many of the most likely values are drawn; 0 is all."""


@dataclass(frozen=True)
class RemoteFuture:
    """A distinct future of a world."""

    probability: float
    frames: Frames
    """uint8 `[t, h, w, 3]`."""
    outcome: Outcome | None
    code: tuple[int, ...]
    """Names this future: `step(action, code=...)` goes on with it."""
    log_probability: float
    """Log-probability of the code, in nats."""


@dataclass
class AsyncRemoteWorld:
    """A live world on a server; `close`, or leaving the `async with` block, deletes it.

    Attributes:
        info: Latest description of the world by the server.
        round: Rounds played, by the newest response; `refresh` updates it.
        outcome: Reward and end that the model predicts for the newest frames that were received; None for
            the first observation, and for models without outcomes.
        confidence: `x-confidence` of the newest frames that were received, if it was asked for.
    """

    _api: HttpApi = field(repr=False)
    info: WorldObject
    round: int = 0
    outcome: Outcome | None = None
    confidence: float | None = None

    @property
    def id(self) -> str:
        """Id of the world, with which `worlds.open` finds it again."""
        return self.info.id

    @property
    def _path(self) -> str:
        return f"/v1/worlds/{self.info.id}"

    async def frames(self) -> Frames:
        """Return the newest observation, uint8 `[t, h, w, 3]`."""
        return self._newest(await self._api.frames("GET", f"{self._path}/frames"))

    async def futures(
        self, action: AnyAction = None, num_draws: int = 256, max_futures: int = 16
    ) -> list[RemoteFuture]:
        """Return the distinct futures after an action, the most probable first; the world does not change.

        `step(action, code=future.code)` goes on with one; see `worldmodel.Session.futures`.
        """
        body = {"action": as_json(action), "num_draws": num_draws, "max_futures": max_futures}
        params = {"format": "npy"}
        answer = await self._api.json("POST", f"{self._path}/futures", params=params, json=body)
        return [
            RemoteFuture(
                probability=float(each["probability"]),
                frames=self._api.read_npy(base64.b64decode(each["b64_json"])),
                outcome=each["outcome"] and Outcome(**each["outcome"]),
                code=tuple(each["state"]["code"]),
                log_probability=float(each["state"]["log_probability"]),
            )
            for each in answer["data"]
        ]

    async def step(
        self,
        action: AnyAction = None,
        *,
        confidence: bool = False,
        code: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> StepResult:
        """Play one round and return its frames and outcome; None is the empty action.

        With the `code` of one of `futures`, that future happens; with a `seed`, this round has that one.

        If the response is lost, repeating the call returns the same result: the round is played once. With
        `confidence`, the attribute says how well the round fits an action in words, for one more pass of the
        backbone.
        """
        body = {"step_id": self.round + 1, "action": as_json(action), "code": code and list(code)}
        body |= drop_none(seed=seed)
        params = {"confidence": "true"} if confidence else {}
        received = await self._api.frames("POST", f"{self._path}/step", params, json=body)
        self.round += 1
        return StepResult(self._newest(received), self.outcome)

    async def reset(
        self, observation: Observation | None = None, *, text: str | None = None, fps: float = CLIP_FPS
    ) -> Frames:
        """Restart the world, by default from its initial observation; return the first observation."""
        if observation is not None:
            body: dict[str, Any] = {"files": as_upload("observation", observation, fps)}
        else:
            body = {"json": drop_none(text=text)}
        received = await self._api.frames("POST", f"{self._path}/reset", **body)
        self.round = 0
        return self._newest(received)

    async def fork(self) -> "AsyncRemoteWorld":
        """Return an independent copy of the world."""
        body = await self._api.json("POST", f"{self._path}/fork", idempotent=False)
        return _world(self._api, body)

    async def snapshot(self) -> str:
        """Save the current state and return its id; above the server's limit the oldest is deleted."""
        body = await self._api.json("POST", f"{self._path}/snapshot")
        return str(body["snapshot"])

    async def restore(self, name: str) -> None:
        """Return to a snapshot."""
        body = await self._api.json("POST", f"{self._path}/restore", json={"snapshot": name})
        self.round = int(body["round"])

    async def export(self, name: str | None = None) -> bytes:
        """Return the current state, or the snapshot `name`, as a file from which `worlds.load` plays on."""
        return (await self._api.request("GET", f"{self._path}/snapshot", params=drop_none(name=name))).content

    async def describe(self, question: str | None = None) -> str:
        """Describe the newest observation, or answer a question about it."""
        body = await self._api.json("POST", f"{self._path}/describe", json=drop_none(question=question))
        return str(body["text"])

    async def infer_action(self) -> Action:
        """Return the action that led to the newest observation."""
        return Action.of((await self._api.json("POST", f"{self._path}/infer_action"))["action"])

    async def refresh(self) -> WorldObject:
        """Refresh `info` and `round` from the server."""
        self.info = parse(WorldObject, await self._api.json("GET", self._path))
        self.round = self.info.round
        return self.info

    async def close(self) -> None:
        """Delete the world; a world that is already gone is ignored."""
        try:
            await self._api.request("DELETE", self._path)
        except NotFoundError:
            return

    def _newest(self, received: ReceivedFrames) -> Frames:
        frames, self.outcome, self.confidence = received
        return frames

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _world(api: HttpApi, body: Mapping[str, Any]) -> AsyncRemoteWorld:
    info = parse(WorldObject, body)
    return AsyncRemoteWorld(api, info, info.round)


class AsyncWorlds:
    """The live worlds of this API key."""

    def __init__(self, api: HttpApi) -> None:
        self._api = api

    async def create(
        self,
        observation: Observation | None = None,
        *,
        text: str | None = None,
        actions: Sequence[AnyAction] = (),
        fps: float = CLIP_FPS,
        max_observation_score: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncRemoteWorld:
        """Start a world from an image or video, or from a text.

        Args:
            observation: The image or video.
            text: A description.
            actions: What was done in the last rounds of the video, the newest last.
            fps: Frame rate of a clip in memory.
            max_observation_score: Refuse an observation that is less like what the model knows than this:
                `world.info.observation_score` is 1 at the limit of held-out frames. None refuses none.
            options: Generation settings.

        Raises:
            InputError: neither or both of observation and text are given.
        """
        settings = drop_none(text=text, max_observation_score=max_observation_score, **options)
        if actions:
            settings["actions"] = json.dumps([as_json(action) for action in actions])
        if (observation is None) == (text is None):
            raise InputError("A world starts from an observation or from a text; pass one of them.")
        if observation is None:
            body = await self._api.json("POST", "/v1/worlds", idempotent=False, json=settings)
        else:
            files = as_upload("observation", observation, fps)
            body = await self._api.json("POST", "/v1/worlds", idempotent=False, data=settings, files=files)
        return _world(self._api, body)

    async def load(self, snapshot: bytes | str | Path) -> AsyncRemoteWorld:
        """Start a world from a snapshot that `export` returned, or from a file of one.

        Any server of the same model takes it, and continues with the same frames.
        """
        data = snapshot if isinstance(snapshot, bytes) else read_file(snapshot, "an exported snapshot")
        files = {"snapshot": ("world.safetensors", data, "application/octet-stream")}
        return _world(self._api, await self._api.json("POST", "/v1/worlds", idempotent=False, files=files))

    async def open(self, identity: str) -> AsyncRemoteWorld:
        """Return the live world with this id."""
        return _world(self._api, await self._api.json("GET", f"/v1/worlds/{quote(identity, safe='')}"))

    async def list(self) -> list[WorldObject]:
        """Return the descriptions of all live worlds, oldest first."""
        return [parse(WorldObject, item) for item in (await self._api.json("GET", "/v1/worlds"))["data"]]


class AsyncVideos:
    """Videos that the server generates in the background and stores for a while."""

    def __init__(self, api: HttpApi) -> None:
        self._api = api

    async def create(
        self,
        prompt: str,
        observation: Observation | None = None,
        *,
        actions: Iterable[AnyAction] = (),
        seconds: float | None = None,
        num_frames: int | None = None,
        idempotency_key: str | None = None,
        fps: float = CLIP_FPS,
        **options: Unpack[Options],
    ) -> VideoObject:
        """Request a video.

        With an observation, the prompt is the first action; without one, it describes the first frame. A
        second request with the same `idempotency_key` returns the first video.
        """
        fields = drop_none(
            prompt=prompt,
            seconds=None if seconds is None else f"{seconds:g}",
            num_frames=num_frames,
            **options,
        )
        action_list = [as_json(action) for action in actions]
        body: dict[str, Any] = {"json": {**fields, "actions": action_list}}
        if observation is not None:
            data = {**fields, "actions": json.dumps(action_list)}
            body = {"data": data, "files": as_upload("input_reference", observation, fps)}
        key = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        return parse(VideoObject, await self._api.json("POST", "/v1/videos", headers=key, **body))

    async def retrieve(self, identity: str) -> VideoObject:
        """Return the current state of a video."""
        return parse(VideoObject, await self._api.json("GET", _video_path(identity)))

    async def list(self, *, limit: int = 20, after: str | None = None) -> list[VideoObject]:
        """Return a page of videos, newest first; `after` is the last id of the previous page."""
        body = await self._api.json("GET", "/v1/videos", params=drop_none(limit=limit, after=after))
        return [parse(VideoObject, item) for item in body["data"]]

    async def wait(
        self,
        identity: str,
        on_progress: Callable[[VideoObject], None] | None = None,
        *,
        timeout_s: float = 600.0,
        poll_s: float | None = None,
    ) -> VideoObject:
        """Wait until a video is completed; `on_progress` is called after every change.

        Raises:
            VideoFailedError: generation failed, or was not finished after `timeout_s`.
        """
        until, seen = time.monotonic() + timeout_s, None
        while True:
            response = await self._api.request("GET", _video_path(identity))
            video = parse(VideoObject, response.json())
            if on_progress is not None and video != seen:
                on_progress(video)
            seen = video
            if video.status == "failed":
                reason = video.error or VideoError(
                    code="failed", message="The video failed; request it again."
                )
                raise VideoFailedError(reason.message, reason.code)
            if video.done:
                return video
            poll_after_ms = response.headers.get("openai-poll-after-ms", "")
            pause = poll_s or (int(poll_after_ms) / 1000 if poll_after_ms.isdecimal() else POLL_S)
            if time.monotonic() + pause > until:
                raise VideoFailedError(
                    f"The video is at {video.progress} % after {timeout_s:g} s; raise `timeout_s`."
                )
            await self._api.pause(pause)

    async def content(self, identity: str, variant: Variant = "video") -> bytes:
        """Return a completed video as MP4, or its thumbnail or sprite sheet as JPEG."""
        path = f"{_video_path(identity)}/content"
        return (await self._api.request("GET", path, params={"variant": variant})).content

    async def download(self, identity: str, path: str | Path) -> Path:
        """Write a completed video to an .mp4 file atomically and return its path."""
        data = await self.content(identity)
        with atomic_file(path) as temporary:
            temporary.write_bytes(data)
        return Path(path)

    async def delete(self, identity: str) -> None:
        """Delete a video; an unfinished one is cancelled first."""
        await self._api.request("DELETE", _video_path(identity))


class AsyncClient:
    """Asyncio client of a server; `async with` closes its connections."""

    _http: type[httpx.Client] | type[httpx.AsyncClient] = httpx.AsyncClient

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = 180.0,
        retries: int = 4,
    ) -> None:
        """Prepare a client; no request is sent yet.

        Args:
            base_url: URL of the server, without a path.
            api_key: API key, if the server requires one.
            timeout_s: Timeout of one request.
            retries: Maximum number of retries of a request that is safe to repeat.
        """
        self._api = HttpApi(self._http, base_url, api_key, timeout_s, retries)
        self.worlds, self.videos = AsyncWorlds(self._api), AsyncVideos(self._api)

    @property
    def base_url(self) -> str:
        """URL of the server."""
        return self._api.base_url

    async def ready(self) -> bool:
        """Whether the server can be reached and accepts work."""
        try:
            await self._api.request("GET", "/ready", retries=0)
        except ApiError:
            return False
        return True

    async def models(self) -> list[str]:
        """Return the names that `model` accepts: the server's models and their adapters."""
        return [str(item["id"]) for item in (await self._api.json("GET", "/v1/models"))["data"]]

    async def model(self, name: str | None = None) -> ModelObject:
        """Return the description of a model; None asks for the server's model."""
        name = name or (await self.models())[0]
        return parse(ModelObject, await self._api.json("GET", f"/v1/models/{quote(name, safe='')}"))

    async def load_model(self, name: str, folder: str) -> ModelObject:
        """Add a model to the server, as an administrator; `folder` is a name in its `--models-dir`."""
        return await self._load("model", model_name=name, model_path=folder)

    async def unload_model(self, name: str) -> None:
        """Remove a model that was added, with its adapters."""
        await self._api.json("POST", "/v1/unload_model", idempotent=False, json={"model_name": name})

    async def load_adapter(self, name: str, folder: str, *, model: str | None = None) -> ModelObject:
        """Add an adapter to a model, as an administrator; `folder` is a name in `--adapters-dir`.

        Args:
            name: Name by which requests choose it.
            folder: Name of its folder on the server.
            model: Model that it belongs to; None is the one that the server was started with.
        """
        body = drop_none(lora_name=name, lora_path=folder, base_model_name=model)
        return await self._load("lora_adapter", **body)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter."""
        await self._api.json("POST", "/v1/unload_lora_adapter", idempotent=False, json={"lora_name": name})

    async def _load(self, kind: str, **body: Any) -> ModelObject:
        # Not sent twice: the second answer would be that there is one of this name.
        return parse(
            ModelObject, await self._api.json("POST", f"/v1/load_{kind}", idempotent=False, json=body)
        )

    async def start_images(self, model: str | None = None) -> list[StartImage]:
        """Return images from which worlds of a model can start; None asks for the server's model."""
        name = model or (await self.models())[0]
        path = f"/v1/models/{quote(name, safe='')}/start_images"
        found = (await self._api.json("GET", path))["data"]
        return [StartImage(str(item["title"]), _decode_png(item["b64_json"])) for item in found]

    async def describe(
        self, observation: Observation, question: str | None = None, fps: float = CLIP_FPS
    ) -> str:
        """Describe an image or video, or answer a question about it."""
        _, data, kind = as_upload("", observation, fps)[""]
        url = {"url": f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"}
        name = "video_url" if kind.startswith("video/") else "image_url"
        content: list[dict[str, Any]] = [{"type": name, name: url}]
        if question:
            content.append({"type": "text", "text": question})
        body = {"messages": [{"role": "user", "content": content}]}
        response = await self._api.json("POST", "/v1/chat/completions", json=body)
        return str(response["choices"][0]["message"]["content"])

    async def generate_image(self, text: str, **options: Unpack[Options]) -> np.ndarray:
        """Generate an image from a text, uint8 `[h, w, 3]`."""
        body = drop_none(prompt=text, **options)
        response = await self._api.json("POST", "/v1/images/generations", json=body)
        return _decode_png(response["data"][0]["b64_json"])

    async def close(self) -> None:
        """Close the connections; worlds stay on the server until they are closed or time out."""
        await self._api.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _decode_png(text: str) -> np.ndarray:
    data = base64.b64decode(text)
    return np.array(Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB"))


def _video_path(identity: str) -> str:
    return f"/v1/videos/{quote(identity, safe='')}"
