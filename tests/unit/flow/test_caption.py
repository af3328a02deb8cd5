"""Captions through a real HTTP endpoint that sees the frames, answers slowly, wrongly, or not at all."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from chat_server import Exchange, chat_server

from worldmodel.errors import ConfigError
from worldmodel.flow.captions.prompts import parse_caption
from worldmodel.flow.captions.strategies import grid, keyframes
from worldmodel.flow.errors import StageError
from worldmodel.flow.stages import find_stage
from worldmodel.media.encoding import encode_video

COLOURS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200)}


def video(*names: str, seconds: int = 2) -> bytes:
    """A video that shows each colour for some seconds, with 2 frames per second."""
    frames = [np.full((64, 64, 3), COLOURS[name], np.uint8) for name in names for _ in range(2 * seconds)]
    return encode_video(np.stack(frames), fps=2, scale=1)


def clips(*videos: bytes, **columns: list[Any]) -> pa.RecordBatch:
    count = len(videos)
    empty = {name: [None] * count for name in ("duration_s", "start_s", "end_s")}
    ids = [f"clip{number}" for number in range(count)]
    return pa.RecordBatch.from_pydict({"clip": ids, "video": list(videos), **empty, **columns})


@pytest.fixture
def caption(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs the stage on videos and returns its rows."""

    def run(url: str, batch: pa.RecordBatch, **settings: Any) -> list[dict[str, Any]]:
        given = {
            "endpoint": url, "model": "colours", "answers": f"sqlite:///{tmp_path}/answers.db",
            "retries": 2, "retry_delay_s": 0.01, **settings,
        }  # fmt: skip
        stage = replace(find_stage("caption"), settings=given)
        stage.check_settings()
        return stage.function()(batch).to_pylist()

    return run


Run = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("strategy", ["grid", "video", "differential"])
def test_each_strategy_shows_the_whole_clip_in_order(caption: Run, strategy: str) -> None:
    with chat_server() as server:
        first, second = caption(
            server.url, clips(video("red", "green", "blue"), video("blue", "red")), strategy=strategy
        )
    assert first["caption"] == "red, then green, then blue"
    assert second["caption"] == "blue, then red"
    assert first["camera_motion"] == "static"
    assert first["events"][1] == {
        "start": 1.0, "end": 2.0, "text": "It turns green.", "actor": "the frame", "action": "turn green",
    }  # fmt: skip
    assert first["drop"] is first["retry"] is None
    assert all(body["model"] == "colours" for body in server.asked)


def test_differences_follow_each_other_with_the_one_before_in_the_prompt(caption: Run) -> None:
    with chat_server() as server:
        caption(server.url, clips(video("red", "green", "green", "blue")), strategy="differential")
    texts = [[p.get("text") for p in body["messages"][0]["content"]] for body in server.asked]
    images = [sum("image_url" in p for p in body["messages"][0]["content"]) for body in server.asked]
    assert images == [1, 2, 2, 0], "green stayed for two intervals, of which one is a keyframe"
    assert "Before them: red" in texts[1][0]
    assert "at 0.0 s and at 2.0 s" in texts[1][0]
    assert "Before them: from red to green" in texts[2][0]
    assert "[2.0 s to 6.0 s] from green to blue" in texts[3][0]
    assert ["response_format" in body for body in server.asked] == [False, False, False, True]


def test_a_part_of_a_video_is_described_alone(caption: Run) -> None:
    batch = clips(video("red", "green", "blue"), start_s=[2.0], end_s=[6.0], duration_s=[6.0])
    with chat_server() as server:
        (row,) = caption(server.url, batch, strategy="differential")
    assert row["caption"] == "green, then blue"
    assert "at 0.0 s and at 2.0 s" in str(server.asked[1]), "times are those of the clip"


def test_an_interrupted_clip_goes_on_after_its_last_finished_request(caption: Run) -> None:
    batch = clips(video("red", "green", "blue"))
    with chat_server(lambda exchange, number: number >= 2 and (exchange.send({}, 503) or True)) as server:
        (row,) = caption(server.url, batch, strategy="differential")
    assert "503" in row["retry"]
    with chat_server() as healthy:
        (row,) = caption(healthy.url, batch, strategy="differential")
    assert row["caption"] == "red, then green, then blue"
    assert len(healthy.asked) == 2, "the first frame and the first difference are known"
    with chat_server() as other:
        caption(other.url, batch, strategy="differential")
        assert not other.asked
        caption(other.url, batch, strategy="differential", model="another")
        assert len(other.asked) == 4, "another model's answers are others"


def test_busy_and_broken_endpoints_are_asked_again(caption: Run) -> None:
    def fault(exchange: Exchange, number: int) -> bool:
        if number == 0:
            exchange.send({"error": "slow down"}, 429, Retry_After="0.2")
        elif number == 1:
            exchange.connection.close()
        return number < 2

    with chat_server(fault) as server:
        (row,) = caption(server.url, clips(video("red")))
    assert row["caption"] == "red"
    assert len(server.asked) == 3


def test_what_a_busy_endpoint_asks_for_is_passed_on(caption: Run) -> None:
    with chat_server(lambda exchange, number: exchange.send({}, 429, Retry_After="30") or True) as server:
        (row,) = caption(server.url, clips(video("red")), retries=0)
    assert "429" in row["retry"]
    assert row["retry_after_s"] == 30


def test_a_slow_endpoint_is_a_reason_to_try_again_later(caption: Run) -> None:
    done = threading.Event()
    with chat_server(lambda exchange, number: done.wait(30)) as server:
        (row,) = caption(server.url, clips(video("red")), timeout_s=0.1, retries=1)
        done.set()
    assert "ReadTimeout" in row["retry"]
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", '{"caption": "", "camera_motion": "", "events": []}', '{"caption": "a"}']
)
def test_an_answer_off_the_schema_is_asked_for_again(caption: Run, text: str) -> None:
    with chat_server(lambda exchange, number: number == 0 and (exchange.complete(text) or True)) as server:
        (row,) = caption(server.url, clips(video("red")))
    assert row["caption"] == "red"
    assert [body["temperature"] for body in server.asked] == [0, 0.5], "the same request has the same answer"
    with chat_server(lambda exchange, number: exchange.complete(text) or True) as server:
        (row,) = caption(server.url, clips(video("green")))
    assert "answer" in row["retry"]
    assert len(server.asked) == 3


def test_a_request_that_the_endpoint_refuses_costs_one_attempt(caption: Run) -> None:
    with chat_server(lambda exchange, number: exchange.send({"error": "too long"}, 400) or True) as server:
        (row,) = caption(server.url, clips(video("red")))
    assert "too long" in row["retry"]
    assert len(server.asked) == 1


def test_a_wrong_key_ends_the_run_and_a_right_one_is_sent(
    caption: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPTION_KEY", "secret")
    with chat_server() as server:
        caption(server.url, clips(video("red")), api_key_variable="CAPTION_KEY")
        assert server.keys == {"Bearer secret"}
    refuse = lambda exchange, number: exchange.send({}, 401) or True  # noqa: E731
    with chat_server(refuse) as server, pytest.raises(StageError, match="401"):
        caption(server.url, clips(video("blue")))
    with pytest.raises(ConfigError, match="NOT_SET"):
        caption("http://127.0.0.1:1/v1", clips(video("red")), api_key_variable="NOT_SET")


def test_a_spent_budget_ends_the_run_and_a_higher_one_goes_on(caption: Run) -> None:
    batch = clips(video("red", "green"))
    with chat_server() as server:
        with pytest.raises(StageError, match="budget_tokens"):
            caption(server.url, batch, strategy="differential", budget_tokens=20)
        assert len(server.asked) == 2
        (row,) = caption(server.url, batch, strategy="differential", budget_tokens=40)
        assert (row["caption"], len(server.asked)) == ("red, then green", 3)
        with pytest.raises(StageError, match="budget_requests"):
            caption(server.url, clips(video("blue")), budget_requests=3)


def test_clips_are_described_side_by_side_up_to_the_limit(caption: Run) -> None:
    barrier = threading.Barrier(3)

    def fault(exchange: Exchange, number: int) -> bool:
        barrier.wait(20)  # passes only with three requests at once
        return False

    names = ["red"], ["green"], ["blue"], ["red", "green"], ["green", "blue"], ["blue", "red"]
    with chat_server(fault) as server:
        rows = caption(server.url, clips(*(video(*each) for each in names)), max_in_flight=3)
    assert [row["caption"] for row in rows] == [", then ".join(each) for each in names]
    assert server.busiest == 3


def test_a_damaged_video_is_dropped_with_its_reason(caption: Run) -> None:
    with chat_server() as server:
        bad, good = caption(server.url, clips(b"no video at all", video("red")))
    assert "not a video" in bad["drop"]
    assert good["caption"] == "red"


def test_settings_are_checked(caption: Run) -> None:
    for settings, named in (
        ({"strategy": "banana"}, "banana"),
        ({"prompt_version": "99"}, "99"),
        ({"endpoint": "file:///etc"}, "file:///etc"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"strategy": "differential", "prompt_version": "plain"}, "plain"),
        ({"colour": 1}, "colour"),
    ):
        with pytest.raises(ConfigError, match=named):
            caption("http://127.0.0.1:1/v1", clips(video("red")), **settings)


def test_the_key_has_the_prompts_and_not_the_address() -> None:
    stage = find_stage("caption")
    given = {"endpoint": "http://a", "model": "m", "prompt_version": "1"}
    key = replace(stage, settings=given).key()
    assert replace(stage, settings={**given, "endpoint": "http://b", "retries": 9}).key() == key
    assert replace(stage, settings={**given, "prompt_version": "2"}).key() != key


def test_events_stay_within_the_clip() -> None:
    events = [
        {"start": 3, "end": 9, "text": "late", "actor": "a", "action": "b"},
        {"start": -1, "end": 2, "text": "early", "actor": "a", "action": "b"},
        {"start": 7, "end": 8, "text": "after the end", "actor": "a", "action": "b"},
        {"start": 2, "end": 2, "text": "of no length", "actor": "a", "action": "b"},
    ]
    text = json.dumps({"caption": "c", "camera_motion": "static", "events": events})
    found = parse_caption(f"```json\n{text}\n```", length_s=5.0)
    assert [(event["text"], event["start"], event["end"]) for event in found.events] == [
        ("early", 0.0, 2.0), ("late", 3.0, 5.0),
    ]  # fmt: skip


def test_keyframes_are_those_that_differ_and_a_grid_has_every_frame() -> None:
    frames = [np.full((40, 48, 3), value, np.uint8) for value in (10, 11, 60, 61, 120)]
    assert keyframes(frames, 0.03) == [0, 2, 4]
    sheet = grid(frames)
    assert sheet.shape == (80, 144, 3)
    assert [int(sheet[y, x, 0]) for y in (0, 40) for x in (0, 48, 96)] == [10, 11, 60, 61, 120, 0]


@pytest.mark.slow
def test_our_own_server_describes_a_picture(caption: Run) -> None:
    pytest.importorskip("fastapi")
    from importlib.resources import files

    from worldmodel.demo.local_server import served
    from worldmodel.serving.client import Client

    picture = files("worldmodel.demo").joinpath("first_frame.png").read_bytes()
    with served("shapes-tiny") as server:
        url = server.url
        (row,) = caption(
            f"{url}/v1",
            clips(picture),
            model="shapes-tiny",
            prompt_version="plain",
            max_tokens=0,
            num_frames=1,
        )
        with Client(url) as client:
            expected = client.describe(picture)
    assert row["caption"]
    assert row["caption"] == expected
    assert row["events"] == []
