"""AsyncAPI 3 document of the WebSocket, generated from the event classes."""

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import yaml
from pydantic.json_schema import models_json_schema

from worldmodel.serving.realtime.events import (
    CLIENT_EVENT_CLASSES,
    PROTOCOL,
    SERVER_EVENT_CLASSES,
    Event,
    event_type,
)

DESCRIPTION = """\
One WebSocket plays one world. The server sends `session.created` first, with the actions that the model \
accepts and the limits of the session. The client sends `session.start`, followed by the upload if it \
announced one. The server replies with `video.start` and then sends chunks: each is a \
`video.chunk_metadata` followed by `num_messages` binary messages.

Actions are sent as `session.interaction` at any time. Each is acknowledged at once \
(`session.interaction.queued`) and takes effect with the next chunk; `session.interaction.applied` names \
its first frame. With pace `realtime` the world keeps running, at most one chunk ahead of a client that \
plays at `fps`, and an action replaces a chunk without one that is being generated; after the end of an \
episode (`outcome.ended`) it waits for actions, unless `num_frames` was sent; with `on_action` it \
waits for actions; with `asap` too, and plays them as fast as it can. A client that sends \
`session.playback` as it shows frames keeps the world from running on while it shows none. `session.undo` \
gives up the chunk that is being generated and goes back by a round.

The client messages of vLLM-Omni's socket of the same path are accepted too: `prompt`, `model`, `width`, \
`height`, `fps`, `num_frames`, `image_reference` and the format `m4s` in `session.start`, and `prompt`, \
`multi_modal_data.camera` and `transition_chunks` (0 or 1) in `session.interaction`. The server's events are \
those below.

Times are in seconds. A rejected event is answered with `error`; only fatal errors close the socket. Close \
codes: 1000 after `session.done`, 1001 after that of a server that stops, 1008 client error, 1009 message \
too large, 1011 internal error, 1013 server full. A handshake without a valid key is answered with 401.
"""
UPLOAD = (
    "Image (PNG, JPEG, WebP) or video (MP4, H.264) to start from; follows a session.start with upload true."
)
MEDIA = "JPEG frame, MP4 initialisation segment or MP4 segment; the preceding event has their number."
SECURITY_SCHEMES: dict[str, Any] = {
    "header": {
        "type": "http",
        "scheme": "bearer",
        "description": "`Authorization: Bearer KEY`, for clients that can set headers.",
    },
    "subprotocol": {
        "type": "httpApiKey",
        "in": "header",
        "name": "Sec-WebSocket-Protocol",
        "description": "`worldmodel.v1, worldmodel.key.KEY`, for browsers; the server accepts with "
        "`worldmodel.v1`.",
    },
}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "session.start": [
        {"type": "session.start", "text": "a red ball", "pace": "on_action"},
        {"type": "session.start", "upload": True, "seed": 7},
        {"type": "session.start", "model": "shapes-tiny", "prompt": "a red ball", "format": "m4s"},
    ],
    "session.interaction": [
        {"type": "session.interaction", "interaction": {"event_id": f"e{index}", "event": {"action": action}}}
        for index, action in enumerate(
            (
                "the red ball moves left",
                {"keys": ["red", "left"]},
                {
                    "text": "go on",
                    "camera": {
                        "mode": "velocity",
                        "data": {"translation": [0, 0, 1], "rotation": [0, 0.131, 0, 0.991]},
                    },
                },
                None,
            )
        )
    ]
    + [
        {
            "type": "session.interaction",
            "interaction": {"event": {"prompt": "the red ball jumps"}, "transition_chunks": 0},
        }
    ],
}


def document(path: str) -> dict[str, Any]:
    """Return the AsyncAPI document for a WebSocket at `path`."""
    payloads, schemas = models_json_schema(
        [
            *((event, "validation") for event in CLIENT_EVENT_CLASSES),
            *((event, "serialization") for event in SERVER_EVENT_CLASSES),
        ],
        ref_template="#/components/schemas/{model}",
    )
    payload_of = {event: schema for (event, _), schema in payloads.items()}
    messages = {
        event_type(event): _message(event, payload_of[event])
        for event in CLIENT_EVENT_CLASSES + SERVER_EVENT_CLASSES
    }
    for name, summary in (("upload", UPLOAD), ("media", MEDIA)):
        messages[name] = {
            "name": name,
            "summary": summary,
            "contentType": "application/octet-stream",
            "payload": {"type": "string", "format": "binary"},
        }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "worldmodel realtime video",
            "version": str(PROTOCOL),
            "license": {"name": "Apache-2.0"},
            "description": DESCRIPTION,
        },
        "defaultContentType": "application/json",
        "servers": {
            "local": {
                "host": "127.0.0.1:8000",
                "protocol": "ws",
                "description": "Default address of `worldmodel serve`.",
                "security": [_ref("components", "securitySchemes", name) for name in SECURITY_SCHEMES],
            }
        },
        "channels": {
            "realtime": {
                "address": path,
                "messages": {name: _ref("components", "messages", name) for name in messages},
                "bindings": {"ws": {"method": "GET", "bindingVersion": "0.1.0"}},
            }
        },
        "operations": {
            "receive": _operation("receive", "Client messages.", CLIENT_EVENT_CLASSES, "upload"),
            "send": _operation("send", "Server messages.", SERVER_EVENT_CLASSES, "media"),
        },
        "components": {
            "securitySchemes": SECURITY_SCHEMES,
            "messages": messages,
            "schemas": schemas["$defs"],
        },
    }


@cache
def document_yaml(path: str) -> str:
    """Return the AsyncAPI document as YAML."""
    return yaml.safe_dump(document(path), sort_keys=False, allow_unicode=True, width=110)


def _message(event: type[Event], payload: dict[str, Any]) -> dict[str, Any]:
    name = event_type(event)
    message = {
        "name": name,
        "summary": " ".join(inspect.getdoc(event).split()),  # type: ignore[union-attr]
        "contentType": "application/json",
        "payload": payload,
    }
    if name in EXAMPLES:
        message["examples"] = [{"payload": example} for example in EXAMPLES[name]]
    return message


def _operation(action: str, summary: str, events: Iterable[type[Event]], binary: str) -> dict[str, Any]:
    names = [*map(event_type, events), binary]
    return {
        "action": action,
        "summary": summary,
        "channel": _ref("channels", "realtime"),
        "messages": [_ref("channels", "realtime", "messages", name) for name in names],
    }


def _ref(*path: str) -> dict[str, str]:
    return {"$ref": "/".join(("#", *path))}
