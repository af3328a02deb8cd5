"""Events of `WS /v1/realtime/video`: JSON text messages, distinguished by `type`; media are binary messages.

`parse_event` validates every client message and rejects unknown fields. `realtime.asyncapi` generates the
AsyncAPI document from these classes. Client messages of vLLM-Omni's socket of the same path are events of
this protocol too: `prompt`, `model`, `image_reference` and format `m4s` in a start, `prompt` and
`multi_modal_data.camera` in an interaction.
"""

import secrets
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from worldmodel.episodes import Outcome
from worldmodel.errors import WorldModelError
from worldmodel.serving.actions import KIND_TYPES, ActionBody, ActionSchema, StrictModel, plain
from worldmodel.serving.errors import ApiError
from worldmodel.serving.protocol import (
    ErrorBody,
    InputReference,
    Name,
    NumFrames,
    Prompt,
    Question,
    StateObject,
    WorldRequest,
)

PROTOCOL = 1
"""Protocol version; incremented by changes that break existing clients."""

Format = Literal["jpeg", "png", "fmp4", "m4s"]
"""jpeg and png: one message per frame, png without loss; fmp4: the initialisation segment after
`video.start`, then one MP4 segment per chunk; m4s: as fmp4, but the first chunk begins with the
initialisation segment, as in vLLM-Omni."""
Pace = Literal["realtime", "on_action", "asap"]
"""realtime: the world keeps running; on_action: it waits for actions, and plays no faster than in real time;
asap: it waits for actions, and plays each at once."""
Reason = Literal[
    "stopped",
    "idle",
    "start_timeout",
    "session_limit",
    "round_limit",
    "num_frames",
    "server_stopping",
    "model_unloaded",
]
"""Reason for the end of a session without an error."""
EventId = Annotated[str, Field(min_length=1, max_length=64)]
"""Chosen by the client and repeated in the reply."""

INVALID_EVENT = "invalid_event"
"""Code of the error of a message that is not a valid event."""
MAX_MESSAGE_CHARACTERS = 500
"""Maximum length of an error message, which may quote client input."""


class Event(StrictModel):
    """Base class of events."""


# ---- from the client -------------------------------------------------------------------------------------


class ClientEvent(Event):
    """An event with an optional id that its reply repeats."""

    event_id: EventId | None = None


class SessionStart(WorldRequest, ClientEvent):
    """Starts the world from a text, an image, the upload in the next binary message, or another world.

    One that is refused by an error that is not fatal may be followed by another.
    """

    type: Literal["session.start"]
    prompt: Prompt | None = None
    """Same as `text`; beside an image or video, the action of the first round."""
    upload: bool = False
    """Whether the next message is binary and contains a PNG, JPEG, WebP or MP4 (H.264)."""
    image_reference: InputReference | None = None
    """An image that fits into a text message."""
    width: Annotated[int, Field(ge=1)] | None = None
    """Width of a frame; must be the model's, as `height` and `fps` must."""
    height: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[int, Field(ge=1)] | None = None
    num_frames: NumFrames | None = None
    """Ends the session after the chunk that reaches so many frames; without it, the world runs on."""
    adapter: Name | None = None
    format: Format = "jpeg"
    pace: Pace | None = None
    """By default the model's, which `session.created` names."""
    resumable: bool = False
    """Whether the world is kept for a minute if the connection breaks: `video.start` has a `resume_id`."""
    world: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Goes on with a copy of a world of `POST /v1/worlds`, of the same key; its settings stay, as for
    `resume_id`."""
    resume_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Goes on with the world of a connection that broke; its settings stay, so none but `format`, `pace` and
    `num_frames` is sent with it."""


class MultiModalData(Event):
    """What an interaction has beside words."""

    camera: KIND_TYPES["camera"]  # type: ignore[valid-type]


class InteractionEvent(Event):
    """The action of an interaction: `action`, or else `prompt`, `multi_modal_data` or both."""

    action: ActionBody | Annotated[str, Field(max_length=4000)] | None = None
    prompt: Prompt | None = None
    """The action in words."""
    multi_modal_data: MultiModalData | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if ("action" in self.model_fields_set) == bool(self.prompt or self.multi_modal_data):
            raise ValueError("send action, or else prompt or multi_modal_data")
        return self

    @property
    def taken(self) -> str | dict[str, Any] | None:
        """The action in a form that `Action.of` accepts."""
        if "action" in self.model_fields_set:
            return plain(self.action)
        camera = self.multi_modal_data and self.multi_modal_data.camera
        return plain(ActionBody(text=self.prompt, camera=camera))


class Interaction(Event):
    """An action and the id that its acknowledgements repeat."""

    event_id: EventId = Field(default_factory=lambda: secrets.token_hex(8))
    """By default one that the server chooses."""
    event: InteractionEvent
    transition_chunks: Annotated[int, Field(ge=0)] | None = None
    """Chunks within which the action takes effect: 0 or 1, as an action is played within one chunk."""


class SessionInteraction(Event):
    """Queues an action for the next chunk; `replace` first drops the queued ones.

    A chunk without an action that is being generated is given up, and the action takes its place.
    """

    type: Literal["session.interaction"]
    interaction: Interaction
    replace: bool = False


class SessionUpdate(ClientEvent):
    """Changes the pace: `on_action` and `asap` pause a running world, `realtime` resumes it."""

    type: Literal["session.update"]
    pace: Pace


class SessionSnapshot(ClientEvent):
    """Saves the state after the newest chunk."""

    type: Literal["session.snapshot"]


class SessionRestore(ClientEvent):
    """Returns to a snapshot; queued interactions are dropped."""

    type: Literal["session.restore"]
    snapshot: Annotated[str, Field(min_length=1, max_length=64)]


class SessionUndo(ClientEvent):
    """Goes back by a round; a chunk that is being generated is given up, and queued interactions are dropped.

    Rounds can be undone that this connection has played since the start or the last restore, as many as
    there are snapshots (`limits.max_snapshots`). The pace stays: in real time the world runs on from there.
    """

    type: Literal["session.undo"]
    round: Annotated[int, Field(ge=0)] | None = None
    """Round to go back to, as of `video.chunk_metadata`; by default the one before the newest chunk, which a
    client may not have shown yet."""


class SessionFork(ClientEvent):
    """Copies the world after the newest chunk to one that has an id, for requests to `/v1/worlds`."""

    type: Literal["session.fork"]


class SessionDescribe(ClientEvent):
    """Requests a description of the newest observation, or an answer; the world keeps running."""

    type: Literal["session.describe"]
    question: Question | None = None


class SessionPlayback(ClientEvent):
    """Tells how many frames the client has shown; it is not answered.

    After the first one, rounds without an action wait while more than two chunks, and more than half a
    second of frames, have not been shown.
    """

    type: Literal["session.playback"]
    frames: Annotated[int, Field(ge=0)]
    """Frames shown since the session started, the initial observation included."""


class SessionPing(ClientEvent):
    """Checks the connection; does not reset the idle timeout."""

    type: Literal["session.ping"]


class SessionStop(ClientEvent):
    """Ends the session."""

    type: Literal["session.stop"]


Command = SessionSnapshot | SessionRestore | SessionUndo | SessionUpdate
"""Commands that run between two chunks."""
AnyClientEvent = (
    SessionStart
    | SessionInteraction
    | Command
    | SessionFork
    | SessionDescribe
    | SessionPlayback
    | SessionPing
    | SessionStop
)
CLIENT_EVENTS: TypeAdapter[AnyClientEvent] = TypeAdapter(
    Annotated[AnyClientEvent, Field(discriminator="type")]
)


def parse_event(text: str) -> AnyClientEvent:
    """Parse one text message.

    Raises:
        ApiError: it is not JSON, or not an event of this protocol.
    """
    try:
        return CLIENT_EVENTS.validate_json(text)
    except (ValidationError, UnicodeEncodeError) as error:
        raise ApiError(_describe(error), INVALID_EVENT) from None


def _describe(error: ValidationError | UnicodeEncodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "The message is not valid Unicode; send JSON in UTF-8."
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"].startswith("union_tag"):
        names = ", ".join(event_type(event) for event in CLIENT_EVENT_CLASSES)
        return f"The event's type is missing or unknown; use one of {names}."
    # The first part of the location is the discriminator, which is not a field.
    path = ".".join(str(part) for part in first["loc"][1:])
    problem = f"{path}: {first['msg']}" if path else first["msg"]
    return f"The event is invalid: {problem[:300]}; see /asyncapi.yaml."


# ---- from the server -------------------------------------------------------------------------------------


class SessionLimits(Event):
    """Limits above which the server rejects events or ends the session; times in seconds."""

    start_timeout_s: float
    """From the handshake to `session.start` and its upload."""
    idle_timeout_s: float
    """Without any event except pings."""
    max_session_s: float
    send_timeout_s: float
    """Longest time that sending blocks on a client that does not read."""
    max_message_bytes: int
    """Size of a text message."""
    max_upload_bytes: int
    """Size of an upload."""
    max_queued_interactions: int
    max_messages_per_s: float
    max_rounds: int
    max_snapshots: int
    max_inference_steps: int
    """Denoising steps of a round; 0 if the model has no generator, which then takes no guidance either."""


class Reply(Event):
    """An event that may answer one of the client's, whose id it then repeats."""

    event_id: str | None = None


class SessionCreated(Event):
    """First message of the server: the model, its actions and formats, and the limits."""

    type: Literal["session.created"] = "session.created"
    protocol: int = PROTOCOL
    model: str
    engine: str
    adapters: list[str]
    action: ActionSchema
    about: str
    """What the world is and what one wants in it, in a sentence; empty if the model's config does not say."""
    tasks: list[str]
    """What the model was trained on: rounds, imagine (to start from a text), describe, ask, inverse."""
    fps: int
    chunk_frames: int
    image_size: int | tuple[int, int]
    """Height and width of a frame in pixels, or the side of a square."""
    num_inference_steps: int
    guidance_scale: float
    formats: list[Format]
    paces: list[Pace]
    pace: Pace
    """The model's, which is used unless `session.start` has another."""
    limits: SessionLimits


class VideoStart(Reply):
    """The world has started; with `fmp4`, `num_messages` binary messages (initialisation segment) follow."""

    type: Literal["video.start"] = "video.start"
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
    observation_score: float | None = None
    """How unlike what the model knows the upload is: 1 is the limit that 99 % of held-out frames keep."""
    resume_id: str | None = None
    """With it a later `session.start` goes on with this world, if the connection breaks."""


class ChunkMetadata(Event):
    """Describes a chunk, whose frames or segment follow as `num_messages` binary messages."""

    type: Literal["video.chunk_metadata"] = "video.chunk_metadata"
    index: int
    """Number of chunks sent before; chunk 0 is the initial observation."""
    source: Literal["start", "round", "restore", "undo"]
    round: int
    """Rounds that led to this state; decreases after a restore or an undo."""
    first_frame: int
    """Number of frames sent before; never decreases."""
    num_frames: int
    num_messages: int
    num_bytes: int
    action: ActionBody | None
    """The action of this round; null for the empty action."""
    event_ids: list[str]
    """Interactions that took effect with the first frame of this chunk."""
    outcome: Outcome | None
    """Reward and end of the round, if the model predicts them."""
    state: StateObject | None
    """Which future it is, if the model predicts states."""
    generation_s: float


class InteractionQueued(Event):
    """The action was accepted and queued; `position` actions are ahead of it."""

    type: Literal["session.interaction.queued"] = "session.interaction.queued"
    event_id: str
    position: int


class InteractionApplied(Event):
    """The action took effect with frame `frame`, the first of chunk `index`, which follows."""

    type: Literal["session.interaction.applied"] = "session.interaction.applied"
    event_id: str
    index: int
    round: int
    frame: int


class InteractionDropped(Event):
    """An action was dropped before it took effect."""

    type: Literal["session.interaction.dropped"] = "session.interaction.dropped"
    event_id: str
    reason: Literal["replaced", "restored", "undone"]


class SessionUpdated(Reply):
    """The pace has changed."""

    type: Literal["session.updated"] = "session.updated"
    pace: Pace


class SnapshotCreated(Reply):
    """The snapshot was saved; above `limits.max_snapshots` the oldest is deleted."""

    type: Literal["session.snapshot.created"] = "session.snapshot.created"
    snapshot: str
    round: int


class SessionRestored(Reply):
    """The world has returned to a snapshot; a chunk that shows it follows."""

    type: Literal["session.restored"] = "session.restored"
    snapshot: str
    round: int


class SessionUndone(Reply):
    """The world is back after an earlier round; a chunk that shows it follows."""

    type: Literal["session.undone"] = "session.undone"
    round: int


class SessionForked(Reply):
    """The copy, which lives on when the session ends."""

    type: Literal["session.forked"] = "session.forked"
    world: str
    round: int


class SessionDescribed(Reply):
    """Text about the observation that was the newest when the question arrived."""

    type: Literal["session.described"] = "session.described"
    text: str
    round: int


class SessionPong(Reply):
    """Reply to `session.ping`."""

    type: Literal["session.pong"] = "session.pong"


class SessionDone(Event):
    """Last message of the session."""

    type: Literal["session.done"] = "session.done"
    rounds: int
    """Rounds played, including those before an undo or a restore."""
    frames: int
    reason: Reason


class ErrorEvent(Reply):
    """An event was rejected or the session failed; after a fatal error the server closes the socket."""

    type: Literal["error"] = "error"
    error: ErrorBody
    fatal: bool


def error_event(error: WorldModelError, event_id: str | None = None, *, fatal: bool = False) -> ErrorEvent:
    """Return the event that reports an error to the client."""
    source = error if isinstance(error, ApiError) else ApiError
    detail = ErrorBody(type=source.type, code=source.code, message=str(error)[:MAX_MESSAGE_CHARACTERS])
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
    | SessionUndone
    | SessionForked
    | SessionDescribed
    | SessionPong
    | SessionDone
    | ErrorEvent
)
SERVER_EVENTS: TypeAdapter[ServerEvent] = TypeAdapter(Annotated[ServerEvent, Field(discriminator="type")])

CLIENT_EVENT_CLASSES: tuple[type[Event], ...] = get_args(AnyClientEvent)
SERVER_EVENT_CLASSES: tuple[type[Event], ...] = get_args(ServerEvent)


def event_type(event: type[Event]) -> str:
    """Return the value of the `type` field of an event class."""
    return str(get_args(event.model_fields["type"].annotation)[0])
