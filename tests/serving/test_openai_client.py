"""Compatibility with the openai client: videos, chat, images, models."""

import base64
import functools
import io
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from served import decoded

from worldmodel.episodes import DESCRIBE
from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import Keys

openai = pytest.importorskip("openai")
# The service whose shape this is has closed.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KEY = "some-key-0123456789"


@pytest.fixture(scope="module")
def client(serve: Callable[..., str]) -> Any:
    return openai.OpenAI(base_url=f"{serve(keys=Keys([KEY]))}/v1", api_key=KEY, max_retries=0)


def looked_at(*images: np.ndarray) -> list[dict[str, Any]]:
    """Return parts of messages that show images."""
    pngs = (base64.b64encode(encoding.encode_png(each)).decode() for each in images)
    return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}} for png in pngs]


@pytest.fixture(scope="module")
def question(image: np.ndarray) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "how many"}, *looked_at(image)]}


def test_videos_from_asking_to_deleting(client: Any, image: np.ndarray) -> None:
    reference = ("reference.png", encoding.encode_png(image), "image/png")
    video = client.videos.create(
        prompt="the red ball moves left", input_reference=reference, seconds="2", size="32x32", model="tiny"
    )
    assert (video.object, video.model, video.seconds, video.size) == ("video", "tiny", "2", "32x32")
    video = client.videos.poll(video.id)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert len(decoded(client.videos.download_content(video.id).read())) == 16
    for variant in ("thumbnail", "spritesheet"):
        assert client.videos.download_content(video.id, variant=variant).read()[:3] == b"\xff\xd8\xff"
    assert client.videos.retrieve(video.id).id == video.id
    assert client.videos.delete(video.id).deleted is True
    with pytest.raises(openai.NotFoundError, match="video"):
        client.videos.retrieve(video.id)


def test_videos_from_words_with_more_than_the_client_knows(client: Any) -> None:
    more = {"seed": 3, "num_inference_steps": 1, "actions": ["the red ball moves left", "the blue box jumps"]}
    video = client.videos.create_and_poll(prompt="a red ball", extra_body=more)
    assert (video.status, video.num_frames, video.seed) == ("completed", 16, 3)


def test_videos_are_listed_over_pages(client: Any) -> None:
    made = [client.videos.create(prompt="a red ball").id for _ in range(3)]
    listed = [video.id for video in client.videos.list(limit=1)]
    assert listed[:3] == made[::-1]
    assert [video.id for video in client.videos.list(limit=2, order="asc", after=made[0])] == made[1:]
    for name in made:
        client.videos.poll(name)


def test_errors_are_the_client_s_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="32x32"):
        client.videos.create(prompt="a red ball", size="720x1280")
    with pytest.raises(openai.NotFoundError) as missing:
        client.videos.create(prompt="a red ball", model="sora-2")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong-key-0123456789").models.list()


def test_images_and_models(client: Any) -> None:
    images = client.images.generate(
        model="tiny", prompt="a red ball", size="32x32", response_format="b64_json"
    )
    assert base64.b64decode(images.data[0].b64_json).startswith(b"\x89PNG")
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("sora-2")


def test_an_image_is_edited_by_an_action(client: Any, image: np.ndarray, model: WorldModel) -> None:
    png = ("image.png", encoding.encode_png(image), "image/png")
    made = client.images.edit(model="tiny", image=png, prompt="the red ball jumps", n=2)
    for seed, each in enumerate(made.data):
        session = model.session(seed)
        session.reset(image)
        frames = session.step("the red ball jumps").frames
        edited = np.asarray(Image.open(io.BytesIO(base64.b64decode(each.b64_json))))
        np.testing.assert_allclose(edited.astype(int), frames[-1].astype(int), atol=1)
    with pytest.raises(openai.BadRequestError, match="image"):
        client.post("/images/edits", cast_to=object, body={"prompt": "the red ball jumps"})
    with pytest.raises(openai.BadRequestError, match="files"):
        client.images.edit(model="tiny", image=png, mask=png, prompt="the red ball jumps")


def test_chat_of_several_turns(client: Any, image: np.ndarray, model: WorldModel) -> None:
    """The last question is about the newest image, which an earlier message may have brought."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [part]} for part in looked_at(np.zeros_like(image), image)
    ]
    messages += [{"role": "assistant", "content": "a ball"}, {"role": "user", "content": "how many"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    session = model.session()
    session.reset(image)
    assert answer.choices[0].message.content == session.describe("how many")
    for refused in (messages[:-1], messages[-1:]):  # the assistant's turn last; nothing to look at
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=refused)


@pytest.mark.parametrize("from_image", [False, True])
def test_videos_are_remixed_with_another_prompt(client: Any, image: np.ndarray, from_image: bool) -> None:
    more: dict[str, Any] = {"extra_body": {"seed": 4, "num_inference_steps": 1}, "seconds": "2"}
    if from_image:
        more["input_reference"] = ("reference.png", encoding.encode_png(image), "image/png")
    source = client.videos.create(prompt="a red ball", **more)
    remixed = client.videos.remix(source.id, prompt="the blue box jumps")
    assert (remixed.prompt, remixed.remixed_from_video_id) == ("the blue box jumps", source.id)
    assert (remixed.seconds, remixed.seed, source.remixed_from_video_id) == ("2", 4, None)
    direct = client.videos.create(prompt="the blue box jumps", **more)
    films = []
    for video in (remixed, direct, source):
        assert client.videos.poll(video.id).status == "completed"
        films.append(decoded(client.videos.download_content(video.id).read()))
    same, other = (np.abs(films[0].astype(int) - film.astype(int)).mean() for film in films[1:])
    assert same < 1 < other


def test_chat_streams_its_text(
    client: Any, image: np.ndarray, model: WorldModel, question: dict[str, Any]
) -> None:
    ask = functools.partial(client.chat.completions.create, model="tiny", messages=[question])
    whole = ask()
    session = model.session()
    session.reset(image)
    assert whole.choices[0].message.content == session.describe("how many")
    *chunks, last = ask(stream=True, stream_options={"include_usage": True})
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(list(filter(None, texts))) > 1, "the text came at once"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, whole.choices[0].finish_reason]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {chunk.id for chunk in [*chunks, last]} == {chunks[0].id}


def test_chat_counts_tokens_and_ends_at_max_tokens(
    client: Any, model: WorldModel, question: dict[str, Any]
) -> None:
    ask = functools.partial(client.chat.completions.create, model="tiny", messages=[question])
    whole, short, newer = ask(), ask(max_tokens=2), ask(max_completion_tokens=2)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 2)
    assert short.choices[0].message.content == newer.choices[0].message.content
    assert whole.choices[0].message.content.startswith(short.choices[0].message.content)
    asked = short.usage.prompt_tokens
    assert short.usage.total_tokens == asked + 2
    image_only = ask(messages=[{**question, "content": [question["content"][1]]}])
    words = (len(model.backbone.token_ids(text)) for text in ("how many", DESCRIBE))
    assert asked - image_only.usage.prompt_tokens == operator.sub(*words)


def test_chat_samples_with_a_temperature(client: Any, question: dict[str, Any]) -> None:
    def said(**options: Any) -> str:
        answer = client.chat.completions.create(model="tiny", messages=[question], max_tokens=24, **options)
        return answer.choices[0].message.content

    assert said(temperature=1, seed=3) == said(temperature=1, seed=3)
    assert len({said(temperature=2, seed=seed) for seed in range(4)}) > 1
    assert said(temperature=0, seed=1) == said(temperature=0, seed=2)


def test_chat_samples_several_answers(client: Any, question: dict[str, Any]) -> None:
    """Answer `i` is that of the seed `seed + i`, whole and streamed; the question is counted once."""
    ask = functools.partial(
        client.chat.completions.create, model="tiny", messages=[question], max_tokens=12, temperature=1.5
    )
    single = [ask(seed=seed) for seed in (3, 4, 5)]
    texts = [each.choices[0].message.content for each in single]
    assert len(set(texts)) > 1
    together = ask(seed=3, n=3)
    assert [(each.index, each.message.content) for each in together.choices] == list(enumerate(texts))
    usage = together.usage
    assert usage.prompt_tokens == single[0].usage.prompt_tokens
    assert usage.completion_tokens == sum(each.usage.completion_tokens for each in single)
    *chunks, last = ask(seed=3, n=3, stream=True, stream_options={"include_usage": True})
    streamed = [
        [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index] for index in range(3)
    ]
    assert ["".join(each.delta.content or "" for each in parts) for parts in streamed] == texts
    assert [parts[-1].finish_reason for parts in streamed] == [
        each.choices[0].finish_reason for each in single
    ]
    assert last.usage == usage


def test_instructions_of_the_system_come_before_the_question(
    client: Any, image: np.ndarray, model: WorldModel, question: dict[str, Any]
) -> None:
    messages = [{"role": "system", "content": "what colour"}, question]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    session = model.session()
    session.reset(image)
    assert answer.choices[0].message.content == session.describe("what colour\nhow many")
