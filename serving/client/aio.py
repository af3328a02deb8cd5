"""The client's calls, written once: the asyncio client, and over a wire that waits the other one.

`worldmodel.serving.client` is the door to both.
"""

import base64
import io
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx
import numpy as np
from PIL import Image

from worldmodel.errors import InputError
from worldmodel.io import atomic_file
from worldmodel.media import Frame, Frames
from worldmodel.serving.client.transport import (
    AnyAction,
    AsyncWire,
    ConnectionFailed,
    JobFailed,
    Link,
    Observation,
    as_json,
    as_upload,
    given,
    job_failed,
    read,
    read_address,
)
from worldmodel.serving.errors import ApiError, NotFound

BASE_URL = "http://127.0.0.1:8000"
CLIP_FPS = 8.0
"""Pace at which a clip in memory is sent, where no other is named."""
POLL_S = 1.0


@dataclass(frozen=True)
class WorldInfo:
    """What the server says of a world; `action_schema` names the actions its model takes."""

    id: str
    model: str
    engine: str
    round: int
    max_rounds: int
    fps: int
    size: str
    chunk_frames: int
    action_schema: Mapping[str, Any]
    seed: int
    num_inference_steps: int
    guidance_scale: float
    snapshots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Video:
    """What the server says of a video; `progress` is in percent of its denoising steps."""

    id: str
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    prompt: str
    seconds: str
    size: str
    num_frames: int
    fps: int
    seed: int
    created_at: int
    queue_position: int | None = None
    completed_at: int | None = None
    expires_at: int | None = None
    inference_time_s: float | None = None
    error: Mapping[str, str] | None = None

    @property
    def done(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in {"completed", "failed"}


# ---- the calls -------------------------------------------------------------------------------------------


@dataclass
class AsyncRemoteWorld:
    """A world that lives on a server; ends when the `with` block does, or by `close`.

    Attributes:
        info: What the server said of it last.
        round: Rounds played, as far as this client knows.
    """

    _link: Link = field(repr=False)
    info: WorldInfo
    round: int = 0

    @property
    def id(self) -> str:
        """Its name on the server, which is all that is needed to `open` it again."""
        return self.info.id

    @property
    def _path(self) -> str:
        return f"/v1/worlds/{self.info.id}"

    async def frames(self) -> Frames:
        """Return the newest observation, uint8 `[t, h, w, 3]`."""
        return await self._link.frames("GET", f"{self._path}/frames")

    async def step(self, action: AnyAction = None) -> Frames:
        """Play one round and return its frames, uint8 `[t, h, w, 3]`; None lets time pass.

        When the answer is lost, the same call again, here or by the caller, returns what was played.
        """
        body = {"step_id": self.round + 1, "action": as_json(action)}
        frames = await self._link.frames("POST", f"{self._path}/step", json=body)
        self.round += 1
        return frames

    async def reset(
        self, observation: Observation | None = None, *, text: str | None = None, fps: float = CLIP_FPS
    ) -> Frames:
        """Start anew, with nothing given from the same beginning; returns the first observation."""
        if observation is not None:
            frames = await self._link.frames(
                "POST", f"{self._path}/reset", files=as_upload("observation", observation, fps)
            )
        else:
            frames = await self._link.frames("POST", f"{self._path}/reset", json=given(text=text))
        self.round = 0
        return frames

    async def fork(self) -> "AsyncRemoteWorld":
        """Return a second world that goes its own way from here."""
        answer = await self._link.json("POST", f"{self._path}/fork", repeatable=False)
        return _world(self._link, answer)

    async def snapshot(self) -> str:
        """Keep this moment and return its name; above the server's limit the oldest one is forgotten."""
        answer = await self._link.json("POST", f"{self._path}/snapshot")
        return str(answer["snapshot"])

    async def restore(self, name: str) -> None:
        """Go back to a kept moment."""
        answer = await self._link.json("POST", f"{self._path}/restore", json={"snapshot": name})
        self.round = int(answer["round"])

    async def describe(self, question: str | None = None) -> str:
        """Say what is seen now, or answer a question about it."""
        answer = await self._link.json("POST", f"{self._path}/describe", json=given(question=question))
        return str(answer["text"])

    async def infer_action(self) -> str:
        """Say in words which action led to what is seen now."""
        answer = await self._link.json("POST", f"{self._path}/infer_action")
        return str(answer["text"])

    async def refresh(self) -> WorldInfo:
        """Ask the server how the world is, and believe it."""
        self.info = read(WorldInfo, await self._link.json("GET", self._path))
        self.round = self.info.round
        return self.info

    async def close(self) -> None:
        """End the world; one that has ended already is fine."""
        try:
            await self._link.call("DELETE", self._path)
        except NotFound:
            return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _world(link: Link, answer: Mapping[str, Any]) -> AsyncRemoteWorld:
    info = read(WorldInfo, answer)
    return AsyncRemoteWorld(link, info, info.round)


class AsyncWorlds:
    """The live worlds of this client's key."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def create(
        self,
        observation: Observation | None = None,
        *,
        text: str | None = None,
        seed: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        model: str | None = None,
        fps: float = CLIP_FPS,
    ) -> AsyncRemoteWorld:
        """Start a world from a picture or film, or from a description; `fps` is for a clip in memory."""
        settings = given(
            text=text,
            seed=seed,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            model=model,
        )
        if (observation is None) == (text is None):
            raise InputError("A world starts from one thing: give an observation, or a text.")
        if observation is None:
            answer = await self._link.json("POST", "/v1/worlds", repeatable=False, json=settings)
        else:
            files = as_upload("observation", observation, fps)
            answer = await self._link.json("POST", "/v1/worlds", repeatable=False, data=settings, files=files)
        return _world(self._link, answer)

    async def open(self, identity: str) -> AsyncRemoteWorld:
        """Return a live world by its id."""
        return _world(self._link, await self._link.json("GET", f"/v1/worlds/{quote(identity, safe='')}"))

    async def list(self) -> list[WorldInfo]:
        """Return what the server says of all live worlds, oldest first."""
        return [read(WorldInfo, item) for item in (await self._link.json("GET", "/v1/worlds"))["data"]]


class AsyncVideos:
    """Videos that the server makes in the background and keeps for a while."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def create(
        self,
        prompt: str,
        observation: Observation | None = None,
        *,
        actions: Iterable[AnyAction] = (),
        seconds: float | None = None,
        num_frames: int | None = None,
        seed: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        model: str | None = None,
        idempotency_key: str | None = None,
        fps: float = CLIP_FPS,
    ) -> Video:
        """Ask for a video: from an observation, on which the prompt acts, or of the scene that it describes.

        Asking again with the same `idempotency_key` returns the video that was asked for first.
        """
        fields = given(
            prompt=prompt,
            seconds=None if seconds is None else f"{seconds:g}",
            num_frames=num_frames,
            seed=seed,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            model=model,
        )
        acts = [as_json(action) for action in actions]
        body: dict[str, Any] = {"json": fields | ({"actions": acts} if acts else {})}
        if observation is not None:
            fields |= {"actions": json.dumps(acts)} if acts else {}
            body = {"data": fields, "files": as_upload("input_reference", observation, fps)}
        key = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        return read(Video, await self._link.json("POST", "/v1/videos", headers=key, **body))

    async def retrieve(self, identity: str) -> Video:
        """Return how a video is coming on."""
        return read(Video, await self._link.json("GET", _video_path(identity)))

    async def list(self, *, limit: int = 20, after: str | None = None) -> list[Video]:
        """Return a page of videos, newest first; `after` is the last id of the page before."""
        answer = await self._link.json("GET", "/v1/videos", params=given(limit=limit, after=after))
        return [read(Video, item) for item in answer["data"]]

    async def wait(
        self,
        identity: str,
        on_progress: Callable[[Video], None] | None = None,
        *,
        timeout_s: float = 600.0,
        poll_s: float | None = None,
    ) -> Video:
        """Wait until a video is made, telling `on_progress` each time something has changed.

        Raises:
            JobFailed: it ended without pictures, or is not done after `timeout_s`.
        """
        until, seen = time.monotonic() + timeout_s, None
        while True:
            response = await self._link.call("GET", _video_path(identity))
            video = read(Video, response.json())
            if on_progress is not None and video != seen:
                on_progress(video)
            seen = video
            if video.status == "failed":
                raise job_failed(video.error)
            if video.done:
                return video
            told = response.headers.get("openai-poll-after-ms", "")
            pause = poll_s or (int(told) / 1000 if told.isdecimal() else POLL_S)
            if time.monotonic() + pause > until:
                raise JobFailed(
                    f"The video is at {video.progress} % after {timeout_s:g} s; wait longer, or delete it."
                )
            await self._link.wire.sleep(pause)

    async def content(
        self, identity: str, variant: Literal["video", "thumbnail", "spritesheet"] = "video"
    ) -> bytes:
        """Return a finished video's bytes: MP4, or a picture of it."""
        path = f"{_video_path(identity)}/content"
        return (await self._link.call("GET", path, params={"variant": variant})).content

    async def download(self, identity: str, path: str | Path) -> Path:
        """Write a finished video as .mp4, whole or not at all; returns the path."""
        data = await self.content(identity)
        with atomic_file(path) as temporary:
            temporary.write_bytes(data)
        return Path(path)

    async def delete(self, identity: str) -> None:
        """Remove a video; one that is not finished is cancelled first."""
        await self._link.call("DELETE", _video_path(identity))


class AsyncClient:
    """A server's client for asyncio; `async with` closes its connections."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = 180.0,
        retries: int = 4,
    ) -> None:
        """Prepare to talk to the server at `base_url`; nothing is sent yet.

        Args:
            base_url: Address of the server, without a path.
            api_key: Key that the server knows, if it asks for one.
            timeout_s: How long one answer may take.
            retries: How often a call is sent again that can be.
        """
        address, here = read_address(base_url)
        # A proxy of the environment is for other machines.
        wire = AsyncWire(httpx.AsyncClient(trust_env=not here))
        self._join(Link(wire, address, api_key, timeout_s, retries))

    def _join(self, link: Link) -> None:
        self._link, self.worlds, self.videos = link, AsyncWorlds(link), AsyncVideos(link)

    @classmethod
    def over(cls, link: Link) -> Self:
        """Return a client over another link."""
        client = cls.__new__(cls)
        client._join(link)
        return client

    @property
    def base_url(self) -> str:
        """Address of the server."""
        return self._link.base_url

    async def ready(self) -> bool:
        """Return whether the server takes work now; one that cannot be reached does not."""
        try:
            await self._link.call("GET", "/ready", retries=0)
        except (ApiError, ConnectionFailed):
            return False
        return True

    async def models(self) -> list[str]:
        """Return the names that `model` may have: the server's model and its adapters."""
        return [str(item["id"]) for item in (await self._link.json("GET", "/v1/models"))["data"]]

    async def describe(
        self, observation: Observation, question: str | None = None, fps: float = CLIP_FPS
    ) -> str:
        """Say what a picture or film shows, or answer a question about it."""
        _, data, kind = as_upload("", observation, fps)[""]
        url = {"url": f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"}
        name = "video_url" if kind.startswith("video/") else "image_url"
        content: list[dict[str, Any]] = [{"type": name, name: url}]
        if question:
            content.append({"type": "text", "text": question})
        body = {"messages": [{"role": "user", "content": content}]}
        answer = await self._link.json("POST", "/v1/chat/completions", json=body)
        return str(answer["choices"][0]["message"]["content"])

    async def imagine(
        self,
        text: str,
        *,
        seed: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        model: str | None = None,
    ) -> Frame:
        """Return a picture of a described scene, uint8 `[h, w, 3]`."""
        body = given(
            prompt=text,
            seed=seed,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            model=model,
        )
        answer = await self._link.json("POST", "/v1/images/generations", json=body)
        data = base64.b64decode(answer["data"][0]["b64_json"])
        return np.array(Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB"))

    async def close(self) -> None:
        """Close the connections; worlds live on until they are closed or idle for long."""
        await self._link.wire.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _video_path(identity: str) -> str:
    return f"/v1/videos/{quote(identity, safe='')}"
