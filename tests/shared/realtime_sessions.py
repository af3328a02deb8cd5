"""A client of WebSocket sessions, and a real server in the loop of a test."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.context import ServerContext
from worldmodel.serving.realtime import events
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService


class Client:
    """A socket that keeps events and the binary messages that belong to them together."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def act(self, name: str, action: Any, **fields: Any) -> None:
        interaction = {"event_id": name, "event": {"action": action}}
        await self.send("session.interaction", interaction=interaction, **fields)

    async def event(self) -> dict[str, Any]:
        text = await self.socket.recv()
        assert isinstance(text, str), "a binary message that no event announced"
        event = json.loads(text)
        events.SERVER_EVENTS.validate_json(text)
        event["media"] = [await self.socket.recv() for _ in range(event.get("num_messages", 0))]
        assert all(isinstance(message, bytes) for message in event["media"])
        self.seen.append(event)
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        while (event := await self.event())["type"] != kind:
            assert event["type"] != "error", event
        return event

    async def refused(self) -> dict[str, Any]:
        while (event := await self.event())["type"] != "error":
            continue
        return event["error"] | {"fatal": event["fatal"], "event_id": event["event_id"]}

    async def start(self, **fields: Any) -> dict[str, Any]:
        await self.send("session.start", **({"text": "a red ball", "pace": "on_action"} | fields))
        return await self.until("video.start")

    async def closed(self) -> int:
        await self.socket.wait_closed()
        return self.socket.close_code or 0


class Server:
    """A real server on a port of its own, in the test's own loop."""

    def __init__(self, app: FastAPI, port: int) -> None:
        self.app, self.port = app, port
        self.context: ServerContext = app.state.context
        self.service = self.context.models.first

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Client]:
        async with connect(
            f"ws://127.0.0.1:{self.port}{ROUTE}", max_size=None, compression=None, **options
        ) as s:
            yield Client(s)

    async def freed(self) -> bool:
        """Whether all worlds go away within a moment."""
        for _ in range(100):
            if not len(self.context.worlds):
                return True
            await asyncio.sleep(0.02)
        return False


def serve(
    model: WorldModel,
    body: Callable[[Server], Awaitable[None]],
    *,
    limits: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    async def whole(data_dir: str) -> None:
        service = WorldService(model)
        app = create_app(service, ServerConfig(model_name="tiny", data_dir=Path(data_dir), **config))
        context: ServerContext = app.state.context
        session_limits = context.session_limits.model_copy(update=limits or {})
        app.state.context = replace(context, session_limits=session_limits)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(body(Server(app, port)), 120)
            assert await Server(app, port).freed()
        finally:
            server.should_exit = True
            await serving
            context.database.close()
            await service.close()

    with TemporaryDirectory() as data_dir:
        asyncio.run(whole(data_dir))
