"""Compatibility with the openai client: videos, chat, images, models."""

import base64
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import av
import numpy as np
import pytest

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

openai = pytest.importorskip("openai")

KEY = "some-key-0123456789"


@pytest.fixture(scope="module")
def address(
    model: WorldModel,
    listening: Callable[[Any], AbstractContextManager[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    config = ServerConfig("tiny", tmp_path_factory.mktemp("data"), keys=Keys([KEY]))
    with listening(create_app(WorldService(model), config)) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the service whose shape this is has closed
        yield openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)


def test_videos_from_asking_to_deleting(client: Any, image: np.ndarray) -> None:
    reference = ("reference.png", encoding.encode_png(image), "image/png")
    video = client.videos.create(
        prompt="the red ball moves left", input_reference=reference, seconds="2", size="32x32", model="tiny"
    )
    assert (video.object, video.model, video.seconds, video.size) == ("video", "tiny", "2", "32x32")
    video = client.videos.poll(video.id)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    with av.open(io.BytesIO(client.videos.download_content(video.id).read())) as film:
        assert len(list(film.decode(video=0))) == 16
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


def test_errors_are_the_client_s_own(client: Any, address: str) -> None:
    with pytest.raises(openai.BadRequestError, match="32x32"):
        client.videos.create(prompt="a red ball", size="720x1280")
    with pytest.raises(openai.NotFoundError) as missing:
        client.videos.create(prompt="a red ball", model="sora-2")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="wrong-key-0123456789", max_retries=0).models.list()


def test_chat_images_and_models(client: Any, image: np.ndarray, model: WorldModel) -> None:
    url = "data:image/png;base64," + base64.b64encode(encoding.encode_png(image)).decode()
    content = [
        {"type": "text", "text": "how many"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
    session = model.session()
    session.reset(image)
    assert answer.choices[0].message.content == session.describe("how many")
    images = client.images.generate(
        model="tiny", prompt="a red ball", size="32x32", response_format="b64_json"
    )
    assert base64.b64decode(images.data[0].b64_json).startswith(b"\x89PNG")
    assert [each.id for each in client.models.list()] == ["tiny"]
