"""What runs for all keys: worlds and WebSocket sessions, which an administrator can list and end."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path

from worldmodel.serving.context import Caller, Context
from worldmodel.serving.errors import NotFoundError
from worldmodel.serving.protocol import Deleted, ListObject, ResponseBody
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


@router.get("")
async def list_sessions(context: Context, caller: Caller) -> ListObject[SessionObject]:
    """List the worlds and sessions of all keys; needs a key with the option admin, or the only key."""
    context.require_admin(caller, alone=True)
    found: list[SessionObject] = []
    for entry in context.worlds.all():
        world, key = entry.world, context.keys.name(entry.owner)
        found.append(
            SessionObject(id=world.id, kind="world", key=key, created_at=entry.created_at, round=world.round)
        )
    for session in context.sessions.values():
        key, created_at = context.keys.name(session.caller), session.created_at
        found.append(
            SessionObject(id=session.id, kind="websocket", key=key, created_at=created_at, round=None)
        )
    return ListObject(data=found)


@router.delete("/{session_id}", responses=errors(*OBJECT))
async def end_session(
    context: Context, caller: Caller, session_id: Annotated[str, Path(max_length=64, pattern=r"^[\w-]+$")]
) -> Deleted:
    """End a world or a WebSocket session of any key."""
    context.require_admin(caller, alone=True)
    world = next((entry for entry in context.worlds.all() if entry.world.id == session_id), None)
    if world is not None:
        await context.worlds.close(world)
    elif (session := context.sessions.get(session_id)) is not None:
        session.end("stopped")
    else:
        raise NotFoundError("There is no session with this id on this server; GET /v1/sessions lists them.")
    return Deleted(id=session_id, object="session.deleted")
