"""What runs for all keys: worlds and WebSocket sessions, which an administrator can list and end."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path

from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.errors import NotFoundError, PermissionDeniedError
from worldmodel.serving.protocol import ResponseBody
from worldmodel.serving.routes.route_class import ERRORS, OBJECT, AuthenticatedRoute, errors

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=AuthenticatedRoute, responses=ERRORS)


class SessionObject(ResponseBody):
    """A world or a WebSocket session of any key."""

    id: str
    object: Literal["session"] = "session"
    kind: Literal["world", "websocket"]
    key: str
    """Name of its key, or the id of one without a name."""
    created_at: int
    round: int | None
    """Rounds played by a world; null for a WebSocket session."""


class SessionList(ResponseBody):
    """Worlds and WebSocket sessions of this server."""

    object: Literal["list"] = "list"
    data: list[SessionObject]


class SessionDeleted(ResponseBody):
    """Confirms that a session was ended."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


@router.get("")
async def list_sessions(context: Context, caller: Caller) -> SessionList:
    """List the worlds and sessions of all keys; needs a key with the option admin, or the only key."""
    _require_admin(context, caller)
    worlds = [
        SessionObject(
            id=entry.world.id,
            kind="world",
            key=_name(context, entry.owner),
            created_at=entry.created_at,
            round=entry.world.round,
        )
        for entry in context.worlds.all()
    ]
    sockets = [
        SessionObject(
            id=session.id,
            kind="websocket",
            key=_name(context, session.caller),
            created_at=session.created_at,
            round=None,
        )
        for session in context.sessions.values()
    ]
    return SessionList(data=[*worlds, *sockets])


@router.delete("/{session_id}", responses=errors(*OBJECT))
async def end_session(
    context: Context, caller: Caller, session_id: Annotated[str, Path(max_length=64, pattern=r"^[\w-]+$")]
) -> SessionDeleted:
    """End a world or a WebSocket session of any key."""
    _require_admin(context, caller)
    world = next((entry for entry in context.worlds.all() if entry.world.id == session_id), None)
    if world is not None:
        await context.worlds.close(world)
    elif (session := context.sessions.get(session_id)) is not None:
        session.ended_by_admin = True
        session.stop.set()
    else:
        raise NotFoundError("There is no session with this id on this server; GET /v1/sessions lists them.")
    return SessionDeleted(id=session_id)


def _require_admin(context: ServerContext, caller: str) -> None:
    if len(context.keys) > 1 and not context.keys.options(caller).admin:
        raise PermissionDeniedError("This needs a key that has the option admin in the key file.")


def _name(context: ServerContext, caller: str) -> str:
    return context.keys.options(caller).name or caller
