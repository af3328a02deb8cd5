"""Events of `WS /v1/realtime/video`, each a JSON text message told by its `type`; pictures travel as binary.

`serving/asyncapi.yaml` describes the same events for people and other languages; a test compares the two.
Whatever a client sends passes `read_event`, which knows every field by name and refuses all others.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from worldmodel.errors import WorldModelError
from worldmodel.serving.actions import ActionBody, ActionSchema
from worldmodel.serving.errors import ApiError

PROTOCOL = 1
"""Version of these events; it changes when a client written for the old ones would break."""

Format = Literal["jpeg", "fmp4"]
Pace = Literal["realtime", "on_action"]
Reason = Literal["stopped", "idle", "start_timeout", "session_limit", "round_limit"]
"""Why a session is over, if nothing went wrong."""
EventId = Annotated[str, Field(min_length=1, max_length=64)]
"""A name of the client's choice, given back in the answer."""

MAX_MESSAGE_CHARACTERS = 500
"""Of an error: it may repeat what the client sent."""


class InvalidEventError(ApiError):
    """A message is no event of this protocol, or has a wrong field."""

    code = "invalid_event"


class Event(BaseModel):
    """What all events share: no field that is not declared, no value of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


# ---- from the client -------------------------------------------------------------------------------------


class ClientEvent(Event):
    """An event that may carry a name by which its answer is known."""

    event_id: EventId | None = None


class SessionStart(ClientEvent):
    """Begins the world: from `text`, or from the picture or film in the binary message that follows."""

    type: Literal["session.start"]
    text: Annotated[str, Field(min_length=1, max_length=4000)] | None = None
    upload: bool = False
    """Whether the next message is binary and holds a PNG, JPEG, WebP or MP4 (H.264)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_inference_steps: Annotated[int, Field(ge=1, le=64)] | None = None
    guidance_scale: Annotated[float, Field(ge=-100, le=100)] | None = None
    adapter: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    format: Format = "jpeg"
    pace: Pace = "realtime"


class InteractionEvent(Event):
    """The inner part of an interaction."""

    action: ActionBody | Annotated[str, Field(max_length=4000)] | None


class Interaction(Event):
    """An action with the name that its receipts carry."""

    event_id: EventId
    event: InteractionEvent


class SessionInteraction(Event):
    """Queues an action for the next chunk; `replace` first drops those that still wait."""

    type: Literal["session.interaction"]
    interaction: Interaction
    replace: bool = False


class SessionUpdate(ClientEvent):
    """Changes the pace: `on_action` pauses a world that runs, `realtime` lets it run."""

    type: Literal["session.update"]
    pace: Pace


class SessionSnapshot(ClientEvent):
    """Keeps the moment after the newest chunk."""

    type: Literal["session.snapshot"]


class SessionRestore(ClientEvent):
    """Goes back to a kept moment; interactions that still wait are dropped."""

    type: Literal["session.restore"]
    snapshot: Annotated[str, Field(min_length=1, max_length=64)]


class SessionDescribe(ClientEvent):
    """Asks for words about what is seen now; the world goes on meanwhile."""

    type: Literal["session.describe"]
    question: Annotated[str, Field(min_length=1, max_length=400)] | None = None


class SessionPing(ClientEvent):
    """Asks whether the server is there; it does not count as use of the world."""

    type: Literal["session.ping"]


class SessionStop(ClientEvent):
    """Ends the session."""

    type: Literal["session.stop"]


Command = SessionSnapshot | SessionRestore | SessionUpdate
"""What is done between two chunks."""
AnyClientEvent = SessionStart | SessionInteraction | Command | SessionDescribe | SessionPing | SessionStop
CLIENT_EVENTS: TypeAdapter[AnyClientEvent] = TypeAdapter(
    Annotated[AnyClientEvent, Field(discriminator="type")]
)


def read_event(text: str) -> AnyClientEvent:
    """Read one text message.

    Raises:
        InvalidEventError: it is no JSON, or no event of this protocol.
    """
    try:
        return CLIENT_EVENTS.validate_json(text)
    except (ValidationError, UnicodeEncodeError) as error:
        raise InvalidEventError(_sentence(error)) from None


def _sentence(error: ValidationError | UnicodeEncodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "The message is not valid Unicode; send JSON in UTF-8."
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"].startswith("union_tag"):
        names = ", ".join(str(kind.model_fields["type"].annotation.__args__[0]) for kind in client_events())
        return f"The event's type is missing or unknown; use one of {names}."
    # The discriminator is part of the location; users know fields by their own names only.
    place = ".".join(str(part) for part in first["loc"][1:])
    told = f"{place}: {first['msg']}" if place else first["msg"]
    return f"The event cannot be read: {told[:300]}; see /asyncapi.yaml."


# ---- from the server -------------------------------------------------------------------------------------


class Limits(Event):
    """Beyond these the server refuses or ends a session."""

    start_timeout_s: float
    """From the handshake to `session.start` and its upload."""
    idle_timeout_s: float
    """Without any event but pings."""
    max_session_s: float
    send_timeout_s: float
    """How long one message may wait for a client that does not read."""
    max_message_bytes: int
    """Of a text message."""
    max_upload_bytes: int
    """Of the binary message that a session starts from."""
    max_queued_interactions: int
    max_messages_per_s: float
    max_rounds: int
    max_snapshots: int


class SessionCreated(Event):
    """The server's first message: what the model takes and makes, and under which limits."""

    type: Literal["session.created"] = "session.created"
    protocol: int = PROTOCOL
    model: str
    engine: str
    adapters: list[str]
    action: ActionSchema
    fps: int
    chunk_frames: int
    image_size: int | tuple[int, int]
    """Height and width of a frame in pixels, or the side of a square."""
    num_inference_steps: int
    guidance_scale: float
    formats: list[Format]
    paces: list[Pace]
    limits: Limits


class VideoStart(Event):
    """The world has begun. With `fmp4` the initialisation segment follows, `num_messages` binary messages."""

    type: Literal["video.start"] = "video.start"
    event_id: str | None = None
    format: Format
    content_type: str
    num_messages: int
    width: int
    height: int
    fps: int
    chunk_frames: int
    pace: Pace
    seed: int
    num_inference_steps: int
    guidance_scale: float


class ChunkMetadata(Event):
    """A chunk; the `num_messages` binary messages that follow are its frames or its segment."""

    type: Literal["video.chunk_metadata"] = "video.chunk_metadata"
    index: int
    """Counts chunks sent, from 0; the first shows the observation that the world starts from."""
    source: Literal["start", "round", "restore"]
    round: int
    """Rounds that this moment of the world has behind it; goes back after a restore."""
    first_frame: int
    """Counts frames sent, from 0; never goes back."""
    num_frames: int
    num_messages: int
    num_bytes: int
    action: ActionBody | None
    """What was done in this round; null when time just passed."""
    event_ids: list[str]
    """Interactions that took effect with this chunk's first frame."""
    generation_s: float


class InteractionQueued(Event):
    """Receipt: the action is understood and waits for the next chunk, `position` others before it."""

    type: Literal["session.interaction.queued"] = "session.interaction.queued"
    event_id: str
    position: int


class InteractionApplied(Event):
    """Receipt: the action took effect with frame `frame`, the first of chunk `index`, which follows."""

    type: Literal["session.interaction.applied"] = "session.interaction.applied"
    event_id: str
    index: int
    round: int
    frame: int


class InteractionDropped(Event):
    """Receipt: the action was queued and will not happen."""

    type: Literal["session.interaction.dropped"] = "session.interaction.dropped"
    event_id: str
    reason: Literal["replaced", "restored"]


class SessionUpdated(Event):
    """The pace from now on."""

    type: Literal["session.updated"] = "session.updated"
    event_id: str | None = None
    pace: Pace


class SnapshotCreated(Event):
    """The name of a kept moment; above `limits.max_snapshots` the oldest is forgotten."""

    type: Literal["session.snapshot.created"] = "session.snapshot.created"
    event_id: str | None = None
    snapshot: str
    round: int


class SessionRestored(Event):
    """The world is back at a kept moment; a chunk that shows it follows."""

    type: Literal["session.restored"] = "session.restored"
    event_id: str | None = None
    snapshot: str
    round: int


class SessionDescribed(Event):
    """Words about what was seen when the question came."""

    type: Literal["session.described"] = "session.described"
    event_id: str | None = None
    text: str
    round: int


class SessionPong(Event):
    """The server is there."""

    type: Literal["session.pong"] = "session.pong"
    event_id: str | None = None


class SessionDone(Event):
    """The session's last message."""

    type: Literal["session.done"] = "session.done"
    rounds: int
    """Rounds played, those that a restore took back included."""
    frames: int
    reason: Reason


class ErrorDetail(Event):
    """What went wrong, as in answers over HTTP."""

    type: str
    code: str
    message: str


class ErrorEvent(Event):
    """Something was refused, or went wrong; after a fatal one the server closes."""

    type: Literal["error"] = "error"
    event_id: str | None = None
    error: ErrorDetail
    fatal: bool


def refusal(error: WorldModelError, event_id: str | None = None, *, fatal: bool = False) -> ErrorEvent:
    """Return the event that tells a client of an error it can mend."""
    kind, code = (error.type, error.code) if isinstance(error, ApiError) else (ApiError.type, ApiError.code)
    detail = ErrorDetail(type=kind, code=code, message=str(error)[:MAX_MESSAGE_CHARACTERS])
    return ErrorEvent(event_id=event_id, error=detail, fatal=fatal)


ServerEvent = (
    SessionCreated
    | VideoStart
    | ChunkMetadata
    | InteractionQueued
    | InteractionApplied
    | InteractionDropped
    | SessionUpdated
    | SnapshotCreated
    | SessionRestored
    | SessionDescribed
    | SessionPong
    | SessionDone
    | ErrorEvent
)
SERVER_EVENTS: TypeAdapter[ServerEvent] = TypeAdapter(Annotated[ServerEvent, Field(discriminator="type")])


def client_events() -> tuple[Any, ...]:
    """Return the classes of what a client may send."""
    return AnyClientEvent.__args__


def server_events() -> tuple[Any, ...]:
    """Return the classes of what the server may send."""
    return ServerEvent.__args__
