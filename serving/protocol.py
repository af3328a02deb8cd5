"""What passes over HTTP: every field by name and within bounds; others are refused.

No field names a path, an address, a file or a class: what a request needs comes with it, as JSON or as an
upload. The shape of videos is the Videos API's, that of chat and images the one its clients know.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from worldmodel.serving.actions import ActionBody, ActionSchema
from worldmodel.serving.worlds.service import MAX_STEPS

MAX_ACTIONS = 256
MAX_MEDIA_CHARACTERS = 96 * 2**20

Prompt = Annotated[str, Field(min_length=1, max_length=4000)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Size = Annotated[str, Field(pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}$")]


class Request(BaseModel):
    """What all requests share: no undeclared field, no infinite number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Answer(BaseModel):
    """What all answers share: their fields are as they are declared."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


# Actions


Action = ActionBody | Prompt | None
"""A sentence, an `ActionBody`, or null to wait."""


# Worlds


class Generation(Request):
    """How frames are generated; what is left out is the model's own."""

    model: Name | None = None
    """The server's model or one of its adapters."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: Annotated[float, Field(ge=-100, le=100)] | None = None


class WorldRequest(Generation):
    """Starts a world from a description, or from the upload `observation`."""

    text: Prompt | None = None
    prompt: Prompt | None = None
    """Another name of `text`."""


class ResetRequest(Request):
    """Starts a world anew; with nothing given, from what it began with."""

    text: Prompt | None = None


class StepRequest(Request):
    """Plays one round."""

    step_id: Annotated[int, Field(ge=1, le=2**31)]
    """The world's round + 1; the last step may be sent again and is not played twice."""
    action: Action = None


class RestoreRequest(Request):
    """Goes back to a kept moment."""

    snapshot: Name


class DescribeRequest(Request):
    """Asks for words about what is seen now."""

    question: Annotated[str, Field(min_length=1, max_length=400)] | None = None


class WorldObject(Answer):
    """A live world."""

    id: str
    object: Literal["world"] = "world"
    created_at: int
    model: str
    engine: str
    round: int
    """Rounds played; the next step has `step_id` round + 1."""
    max_rounds: int
    fps: int
    size: str
    chunk_frames: int
    """Frames of one round."""
    action_schema: ActionSchema
    seed: int
    num_inference_steps: int
    guidance_scale: float
    snapshots: list[str]
    idle_timeout_s: float
    """A world that nobody uses for so long is closed."""


class WorldList(Answer):
    """All live worlds of one key, oldest first."""

    object: Literal["list"] = "list"
    data: list[WorldObject]


class SnapshotObject(Answer):
    """A kept moment of a world."""

    object: Literal["world.snapshot"] = "world.snapshot"
    snapshot: str
    round: int


class TextObject(Answer):
    """Words about a world."""

    object: Literal["world.text"] = "world.text"
    text: str
    round: int


class Deleted(Answer):
    """Says that something is gone."""

    id: str
    object: Literal["video.deleted", "world.deleted"]
    deleted: Literal[True] = True


# Videos


def _from_text(value: Any) -> Any:
    """Read actions that came as JSON in a form's text field."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("actions in a form are one JSON list") from None
    return value


class VideoRequest(Generation):
    """Asks for a video.

    With the upload `input_reference` the prompt is the first action on it; without, the prompt describes the
    first scene. `actions` follow, one each round; rounds without one let time pass.
    """

    prompt: Prompt
    actions: Annotated[
        Annotated[list[Action], Field(max_length=MAX_ACTIONS)], BeforeValidator(_from_text)
    ] = []
    size: Size | None = None
    """`WIDTHxHEIGHT`; only the model's own."""
    seconds: Annotated[str, Field(pattern=r"^\d{1,4}(\.\d{1,3})?$")] | None = None
    num_frames: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Instead of `seconds`; with neither, there is one round for each action."""
    fps: Annotated[int, Field(ge=1, le=240)] | None = None
    """Frames per second; only the model's own."""


Status = Literal["queued", "in_progress", "completed", "failed"]
Variant = Literal["video", "thumbnail", "spritesheet"]


class VideoError(Answer):
    """Why a video failed."""

    code: str
    message: str


class VideoObject(Answer):
    """A video, made or in the making."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: Annotated[int, Field(ge=0, le=100)]
    """Denoising steps done, in percent of all rounds'."""
    queue_position: int | None
    """1 for the next to be begun; null when it does not wait."""
    created_at: int
    completed_at: int | None
    expires_at: int
    prompt: str
    seconds: str
    size: str
    num_frames: int
    fps: int
    seed: int
    inference_time_s: float | None
    error: VideoError | None
    remixed_from_video_id: None = None


class VideoList(Answer):
    """A page of one key's videos."""

    object: Literal["list"] = "list"
    data: list[VideoObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


# Chat and images


class DataUrl(Request):
    """Media in the request itself; addresses are not followed."""

    url: Annotated[str, Field(max_length=MAX_MEDIA_CHARACTERS, pattern=r"^data:")]


class TextPart(Request):
    """Words of a message."""

    type: Literal["text"]
    text: Annotated[str, Field(max_length=400)]


class ImagePart(Request):
    """A PNG, JPEG or WebP as `data:image/png;base64,…`."""

    type: Literal["image_url"]
    image_url: DataUrl


class VideoPart(Request):
    """An MP4 (H.264) as `data:video/mp4;base64,…`."""

    type: Literal["video_url"]
    video_url: DataUrl


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class Message(Request):
    """What the user shows and asks."""

    role: Literal["user"]
    content: Annotated[list[Part], Field(min_length=1, max_length=4)]


class ChatRequest(Request):
    """Asks one question about one observation; without words, for a description."""

    model: Name | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=1)]
    stream: Literal[False] = False
    n: Literal[1] = 1
    temperature: Annotated[float, Field(ge=0, le=0)] = 0
    """Answers are greedy."""


class ChatMessage(Answer):
    """The answer's words."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(Answer):
    """The one answer."""

    index: int = 0
    message: ChatMessage
    finish_reason: Literal["stop"] = "stop"
    logprobs: None = None


class ChatObject(Answer):
    """An answer about an observation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]


class ImageRequest(Generation):
    """Asks for pictures of a described scene; picture `i` has seed `seed + i`."""

    prompt: Prompt
    n: Annotated[int, Field(ge=1, le=8)] = 1
    size: Size | None = None
    response_format: Literal["b64_json"] = "b64_json"


class ImageObject(Answer):
    """A PNG in base64."""

    b64_json: str


class ImageList(Answer):
    """The pictures asked for."""

    created: int
    data: list[ImageObject]


class ModelObject(Answer):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(Answer):
    """What requests may name as their model."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


# Health and errors


class Health(Answer):
    """How the server is."""

    status: Literal["ok", "starting", "stopping", "full"]


class ErrorBody(Answer):
    """What went wrong: a kind, a name for programs, a sentence for people."""

    type: str
    code: str
    message: str


class ErrorObject(Answer):
    """The shape of every answer that is an error."""

    error: ErrorBody
