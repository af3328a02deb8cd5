"""Request and response bodies of the HTTP API, for the server and for the client.

Undeclared fields of requests are rejected, and sizes are limited. No field refers to a path, a URL or a
class: media are part of the request. Videos, chat and images follow the OpenAI API.
"""

import json
import re
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from worldmodel.episodes import Outcome, PredictedState
from worldmodel.serving.actions import ActionBody, ActionSchema
from worldmodel.serving.settings import MAX_STEPS

MAX_ACTIONS = 256
MAX_CODE = 4096
"""Variables of the code of a state."""
MAX_MEDIA_CHARACTERS = 96 * 2**20

Prompt = Annotated[str, Field(min_length=1, max_length=4000)]
Name = Annotated[str, Field(max_length=128, pattern=r"^[^\x00]+$")]
Question = Annotated[str, Field(min_length=1, max_length=400)]


def _form(pattern: str, words: str) -> tuple[Any, ...]:
    """Return the annotations of a text of a form, whose error says in words what it is."""

    def check(value: Any) -> Any:
        text = f"{value:g}" if type(value) in (int, float) else value
        if not isinstance(text, str) or re.fullmatch(pattern, text := text.lower()) is None:
            raise ValueError(f"write {words}")
        return text

    return BeforeValidator(check), Field(json_schema_extra={"pattern": f"^{pattern}$"})


_SIZE = r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}"
Size = Annotated[str, *_form(rf"auto|{_SIZE}", "WIDTHxHEIGHT, such as 64x64, or auto")]


class RequestBody(BaseModel):
    """Base class of requests: no undeclared fields, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ResponseBody(BaseModel):
    """Base class of responses; a client ignores the fields that a newer server adds."""

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)


Item = TypeVar("Item")


class ListObject(ResponseBody, Generic[Item]):
    """Objects of one kind."""

    object: Literal["list"] = "list"
    data: list[Item]


Action = ActionBody | Prompt | None
"""A text, an `ActionBody`, or null for the empty action."""


def _from_text(value: Any) -> Any:
    """Parse actions that a form sends as JSON in a text field."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("in a form, actions are one JSON list") from None
    return value


Actions = Annotated[Annotated[list[Action], Field(max_length=MAX_ACTIONS)], BeforeValidator(_from_text)]


# Worlds


class Generation(RequestBody):
    """Generation settings; omitted fields take the defaults of the model."""

    model: Name | None = None
    """Name of one of the server's models or adapters; by default the model that it was started with."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_inference_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = None
    guidance_scale: Annotated[float, Field(ge=-100, le=100)] | None = None
    negative_prompt: Prompt | None = None
    """Text that guidance leads away from, for models whose generator reads text."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Of the choice between possible futures, for models whose states have a code; 0: the most likely."""
    top_k: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Only so many of the most likely values of each variable of that code are drawn; 0 is all."""


class WorldRequest(Generation):
    """Starts a world from a text, or from the upload `observation`."""

    text: Prompt | None = None
    prompt: Prompt | None = None
    """Alias of `text`."""
    actions: Actions = []
    """What was done in the last rounds of an uploaded video, the newest last: it goes on as it moved."""
    max_observation_score: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Refuse an upload whose `observation_score` is above it; by default none is refused."""


class ResetRequest(RequestBody):
    """Restarts a world, by default from its origin."""

    text: Prompt | None = None


class StepRequest(RequestBody):
    """Plays one round."""

    step_id: Annotated[int, Field(ge=1, le=2**31, strict=True)]
    """The world's round + 1; repeating the last step returns the same frames."""
    action: Action = None
    code: Annotated[list[Annotated[int, Field(ge=0, lt=2**20)]], Field(max_length=MAX_CODE)] | None = None
    """Code of the future that happens, as `futures` lists them; by default one is drawn."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of this round alone; by default the world's."""


class FuturesRequest(RequestBody):
    """Asks for the distinct futures after an action."""

    action: Action = None
    num_draws: Annotated[int, Field(ge=1, le=4096)] = 256
    """Number of codes that are drawn; probabilities are shares of them."""
    max_futures: Annotated[int, Field(ge=1, le=16)] = 16


class RestoreRequest(RequestBody):
    """Returns to a snapshot."""

    snapshot: Name


class DescribeRequest(RequestBody):
    """Requests a description of the newest observation, or an answer to a question."""

    question: Question | None = None


class StateObject(ResponseBody):
    """What a predicted state says of which future it is."""

    code: list[int]
    """A value per variable; empty for models whose states have no code."""
    log_probability: float
    """Log-probability of the code before it was drawn, in nats."""

    @classmethod
    def of(cls, state: PredictedState) -> "StateObject":
        """Return a state as JSON."""
        return cls(code=list(state.code), log_probability=state.log_probability)


class FutureObject(ResponseBody):
    """A distinct future of a world."""

    probability: float
    state: StateObject
    """Its code, with which a step makes it happen."""
    outcome: Outcome | None
    b64_json: str
    """Its frames as a file of `content_type`, in base64."""


class FutureList(ListObject[FutureObject]):
    """The distinct futures of a world after an action, the most probable first."""

    round: int
    """The round that they would be."""
    content_type: str


class WorldObject(ResponseBody):
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
    progress: int | None
    """Percentage of the denoising steps of the round that is being played; null without one."""
    snapshots: list[str]
    outcome: Outcome | None
    """Of the newest round; null before it, and for models that predict none."""
    state: StateObject | None
    """Of the newest round; null before it, and for models without predicted states."""
    observation_score: float | None
    """How unlike what the model knows the upload is that it started from: 1 is the limit that 99 % of
    held-out frames keep. Null after a restart, and for models that do not say what they know."""
    idle_timeout_s: float
    """Time without use after which the world is closed."""


class SnapshotObject(ResponseBody):
    """A snapshot of a world."""

    object: Literal["world.snapshot"] = "world.snapshot"
    snapshot: str
    round: int


class TextObject(ResponseBody):
    """Text about a world."""

    object: Literal["world.text"] = "world.text"
    text: str
    round: int


class Deleted(ResponseBody):
    """Confirms a deletion, that a session was ended, or that a model or an adapter was unloaded."""

    id: str
    object: Literal["video.deleted", "world.deleted", "session.deleted", "model.deleted"]
    deleted: Literal[True] = True


# Videos

Seconds = Annotated[str, *_form(r"[0-9]{1,4}(\.[0-9]{1,3})?", "a number of seconds, such as 4 or 2.5")]
NumFrames = Annotated[int, Field(ge=1, le=1_000_000)]
MediaUrl = Annotated[str, Field(max_length=MAX_MEDIA_CHARACTERS, pattern=r"^data:")]
"""Media as `data:` URL; other URLs are not fetched."""


class InputReference(RequestBody):
    """An image or a video as `data:` URL, beside the form that uploads it."""

    image_url: MediaUrl


class VideoRequest(Generation):
    """Requests a video.

    With the upload `input_reference`, the prompt is the first action; without it, the prompt describes the
    first frame. `actions` are applied one per round; the remaining rounds have empty actions.
    """

    prompt: Prompt
    input_reference: InputReference | None = None
    actions: Actions = []
    size: Size | None = None
    """`WIDTHxHEIGHT`; must be the frame size of the model."""
    seconds: Seconds | None = None
    num_frames: NumFrames | None = None
    """Alternative to `seconds`; without both, one round per action."""
    fps: Annotated[int, Field(ge=1, le=240)] | None = None
    """Frames per second; must be the frame rate of the model."""


class RemixRequest(RequestBody):
    """Requests a video like another one, with the same seed, start and other actions, from a new prompt."""

    prompt: Prompt


class VideoReference(RequestBody):
    """A completed video of this key."""

    id: Name


class DerivedRequest(RequestBody):
    """The source is a completed video, which also gives the settings, or the upload `video` (an MP4)."""

    video: VideoReference | None = None
    model: Name | None = None
    """The model of an upload; a completed video keeps its own."""


class EditRequest(DerivedRequest):
    """Requests a video with the start and length of another one, in which something else happens."""

    prompt: Prompt
    """The action of the first round."""
    actions: Actions | None = None
    """Those of the further rounds; by default the ones of the source."""


class ExtendRequest(DerivedRequest):
    """Requests a video that begins with another one and goes on."""

    prompt: Prompt
    """The action of the first new round."""
    actions: Actions = []
    """Those of the further new rounds."""
    seconds: Seconds | None = None
    """Length of what is added."""
    num_frames: NumFrames | None = None
    """Alternative to `seconds`; without both, one round per action."""


Status = Literal["queued", "in_progress", "completed", "failed"]
Variant = Literal["video", "thumbnail", "spritesheet"]


class VideoError(ResponseBody):
    """The error of a failed video."""

    code: str
    message: str


class VideoObject(ResponseBody):
    """A video and its state."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: Annotated[int, Field(ge=0, le=100)]
    """Percentage of the denoising steps of all rounds."""
    queue_position: int | None
    """1 for the next video; null if it is not queued."""
    created_at: int
    completed_at: int | None
    expires_at: int
    prompt: str
    seconds: str
    size: str
    """Frame size of the model; in the MP4 small frames are enlarged by a whole factor."""
    num_frames: int
    fps: int
    seed: int
    inference_time_s: float | None
    error: VideoError | None
    remixed_from_video_id: str | None
    """The video that this one is a remix, an edit or an extension of."""

    @property
    def done(self) -> bool:
        """Whether the video is completed or failed."""
        return self.status in ("completed", "failed")


class VideoList(ListObject[VideoObject]):
    """One page of the videos of a key."""

    first_id: str | None
    last_id: str | None
    has_more: bool


# Chat and images


class DataUrl(RequestBody):
    """Media, in a form that has a `detail`."""

    url: MediaUrl
    detail: Literal["auto", "low", "high"] = "auto"
    """Models see all media in one size."""


FinishReason = Literal["stop", "length"]
"""The model ended its text, or `max_tokens` did."""


Words = Annotated[str, Field(max_length=400)]


class TextPart(RequestBody):
    """Text of a message."""

    type: Literal["text"]
    text: Words


class ImagePart(RequestBody):
    """PNG, JPEG or WebP as `data:image/png;base64,…`."""

    type: Literal["image_url"]
    image_url: DataUrl


class VideoPart(RequestBody):
    """MP4 (H.264) as `data:video/mp4;base64,…`."""

    type: Literal["video_url"]
    video_url: DataUrl


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class Message(RequestBody):
    """A question, an image or video, or both."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Words | Annotated[list[Part], Field(min_length=1, max_length=4)]


class StreamOptions(RequestBody):
    """What a stream has beside the text."""

    include_usage: bool = False
    """Whether the last chunk has the usage, and no choice."""


class TextFormat(RequestBody):
    """The only format of an answer."""

    type: Literal["text"]


Stop = Annotated[str, Field(min_length=1, max_length=64)]


class ChatRequest(RequestBody):
    """A question about an observation; without text, a request for a description.

    The answer is to the last message, about the newest image or video. The text of system messages is put
    before the question; that of earlier messages of the user and the assistant is not read.
    """

    model: Name | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=64)]
    stream: bool = False
    """Whether to send the text as it is made, as server-sent events of type `chat.completion.chunk`."""
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Longest text; by default 96 tokens."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The newer name of `max_tokens`; it wins if both are given."""
    n: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of answers; answer `i` is sampled with seed `seed + i`."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0
    """0 takes the most likely token."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the sampling, by default a random one."""
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    """Texts before the first of which an answer ends."""
    user: Annotated[str, Field(max_length=512)] | None = None
    """Not read."""
    # What clients send without being asked, with the value that changes nothing.
    top_p: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logprobs: Literal[False] | None = None
    store: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: TextFormat | None = None


class ChatMessage(ResponseBody):
    """The text of the answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(ResponseBody):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: None = None


class Usage(ResponseBody):
    """Tokens of a request: of the image or video and the question, and of the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(ResponseBody):
    """What an answer and its parts have in common."""

    id: str
    created: int
    model: str


class ChatObject(Answer):
    """Answer to a chat request."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[Choice]
    usage: Usage


class Delta(ResponseBody):
    """Text that follows what was sent before."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(ResponseBody):
    """What is new of one answer."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class ChatChunk(Answer):
    """One server-sent event of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ImageRequest(Generation):
    """Requests images; image `i` has seed `seed + i`."""

    prompt: Prompt
    n: Annotated[int, Field(ge=1, le=8)] = 1
    size: Size | None = None
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"


class ImageObject(ResponseBody):
    """A PNG in base64."""

    b64_json: str


class ImageList(ResponseBody):
    """The generated images."""

    created: int
    data: list[ImageObject]


def _is_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", text) is None:
        raise ValueError("write a name of up to 64 letters, digits or _ . -, and no path")
    return text


FolderName = Annotated[str, AfterValidator(_is_name)]


class LoadAdapterRequest(RequestBody):
    """Adds an adapter, with the fields of vLLM."""

    lora_name: FolderName
    """Name by which requests choose it."""
    lora_path: FolderName
    """Name of a folder in the server's `--adapters-dir`; no paths are taken."""
    base_model_name: Name | None = None
    """Model that it belongs to; by default the one that the server was started with."""


class UnloadAdapterRequest(RequestBody):
    """Removes an adapter."""

    lora_name: Name


class LoadModelRequest(RequestBody):
    """Adds a model."""

    model_name: FolderName
    """Name by which requests choose it."""
    model_path: FolderName
    """Name of a folder in the server's `--models-dir`; no paths are taken."""


class UnloadModelRequest(RequestBody):
    """Removes a model."""

    model_name: Name


class ModelObject(ResponseBody):
    """A model or adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = None
    """Model of an adapter; null for a model."""
    tasks: list[str]
    """What it was trained on (`stages.NAME.tasks`) or, where it is not known, what its actions permit."""
    about: str
    """What the world is and what one wants in it, in a sentence; empty if its config does not say."""
    pace: Literal["realtime", "on_action"]
    """Whether its worlds run on without actions, or wait for them."""
    confidence_threshold: float | None
    """Value of `x-confidence` below which it has probably not understood a text; null if not measured."""
    has_futures: bool
    """Whether the distinct futures of an action can be listed (`/v1/worlds/{id}/futures`)."""
    size: str
    """Size of its frames, `WIDTHxHEIGHT`; it makes no others."""
    fps: int
    chunk_frames: int
    """Frames of a round."""
    max_seconds: float
    """Length of the longest video, which may have any number of frames."""
    action_schema: ActionSchema
    """Actions that it takes."""


class StartImageObject(ResponseBody):
    """An image to start a world from: a PNG in base64."""

    title: str
    b64_json: str


# Health and errors


class Health(ResponseBody):
    """State of the server."""

    status: Literal["ok", "stopping", "full", "failed", "failing", "stuck"]
    missing: str | None = None
    """What the server does not offer, and why; absent if nothing is missing."""


class ErrorBody(ResponseBody):
    """Type and code for programs, message for people."""

    type: str
    code: str
    message: str


class ErrorObject(ResponseBody):
    """Body of every error response."""

    error: ErrorBody
