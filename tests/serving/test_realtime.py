"""WebSocket sessions over a real socket: frames, pacing, errors, cleanup."""

import asyncio
import io
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
from fastapi import WebSocket
from PIL import Image
from realtime_sessions import Server, serve

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import ANONYMOUS
from worldmodel.serving.media import decoding
from worldmodel.serving.realtime import events
from worldmodel.serving.realtime.pacing import JPEG_QUALITY
from worldmodel.serving.realtime.sender import EventSender, SlowClientError

ACTIONS = ("the red ball moves left", {"keys": ["left"]}, {"vector": [0.5, 0.0, -1.0]}, None)


def shown(chunk: dict[str, Any]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(io.BytesIO(message))) for message in chunk["media"]])


def close(made: np.ndarray, expected: np.ndarray) -> bool:
    """Whether a client sees these frames: what JPEG loses is lost on both sides."""
    sent = shown({"media": [encoding.encode_jpeg(frame, JPEG_QUALITY) for frame in expected]})
    return made.shape == sent.shape and float(np.abs(made.astype(int) - sent).mean()) < 1


def fast(model: WorldModel, fps: int) -> WorldModel:
    model.config = replace(model.config, fps=fps)
    return model


# ---- what is played --------------------------------------------------------------------------------------


def test_session_created_comes_first(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            hello = await client.event()
            assert hello["type"] == "session.created"
            assert (hello["model"], hello["engine"], hello["protocol"]) == ("tiny", "in-process", 1)
            takes = {"text": {"max_tokens": 64}, "keys": ["left", "right"], "vector": {"size": 3}}
            assert hello["action"]["kinds"] == takes
            assert hello["action"]["widgets"].keys() == takes.keys()
            assert (hello["fps"], hello["chunk_frames"], hello["image_size"]) == (8, 8, 32)
            assert hello["about"] == model.config.about
            assert hello["formats"] == ["jpeg", "png", "fmp4", "m4s"]
            assert hello["limits"] == server.context.session_limits.model_dump()

    serve(model, body)


def test_session_frames_match_the_library(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        session = model.session(seed=3, num_inference_steps=2, guidance_scale=1.5)
        first = session.reset(text="a red ball")
        async with server.client() as client:
            start = await client.start(seed=3, num_inference_steps=2, guidance_scale=1.5, event_id="go")
            assert (start["event_id"], start["seed"], start["content_type"]) == ("go", 3, "image/jpeg")
            chunk = await client.until("video.chunk_metadata")
            assert (chunk["source"], chunk["first_frame"], chunk["round"]) == ("start", 0, 0)
            assert close(shown(chunk), first)
            frames = len(first)
            for index, action in enumerate(ACTIONS, start=1):
                await client.act(f"e{index}", action)
                queued = await client.event()
                assert (queued["type"], queued["event_id"]) == ("session.interaction.queued", f"e{index}")
                applied = await client.event()
                assert (applied["type"], applied["event_id"]) == ("session.interaction.applied", f"e{index}")
                chunk = await client.event()
                assert chunk["type"] == "video.chunk_metadata"
                assert applied["frame"] == chunk["first_frame"] == frames
                assert applied["index"] == chunk["index"] == chunk["round"] == index
                assert chunk["event_ids"] == [f"e{index}"]
                assert chunk["num_bytes"] == sum(map(len, chunk["media"]))
                assert (chunk["action"] is None) == (action is None)
                assert close(shown(chunk), session.step(action).frames)
                frames += chunk["num_frames"]
            await client.send("session.stop")
            done = await client.until("session.done")
            assert (done["rounds"], done["frames"], done["reason"]) == (4, frames, "stopped")
            assert await client.closed() == 1000

    serve(model, body)


def test_png_frames_lose_nothing(model: WorldModel, image: np.ndarray) -> None:
    async def body(server: Server) -> None:
        session = model.session(seed=3, num_inference_steps=0)
        session.reset(image)
        async with server.client() as client:
            order = {
                "upload": True,
                "pace": "on_action",
                "format": "png",
                "seed": 3,
                "num_inference_steps": 0,
            }
            await client.send("session.start", **order)
            await client.socket.send(encoding.encode_png(image))
            assert (await client.until("video.start"))["content_type"] == "image/png"
            assert np.array_equal(shown(await client.until("video.chunk_metadata")), image[None])
            await client.act("e", "go on")
            made = shown(await client.until("video.chunk_metadata"))
            # Equal up to the rounding of a batch.
            assert np.abs(made.astype(int) - session.step("go on").frames).max() <= 1

    try:
        serve(model, body)
    finally:
        decoding.close_decoder()


def test_session_from_upload(model: WorldModel, image: np.ndarray) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.send("session.start", upload=True, pace="on_action")
            await client.send("session.ping")
            await client.socket.send(encoding.encode_png(image))
            chunk = await client.until("video.chunk_metadata")
            assert close(shown(chunk), image[None])

    try:
        serve(model, body)
    finally:
        decoding.close_decoder()


def test_the_pace_is_the_models_unless_the_client_asks_for_another(
    model: WorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(server: Server) -> None:
        for pace in (None, "realtime"):
            async with server.client() as client:
                created = await client.until("session.created")
                assert created["pace"] == "on_action"
                asked = {} if pace is None else {"pace": pace}
                await client.send("session.start", text="a red ball", **asked)
                assert (await client.until("video.start"))["pace"] == (pace or "on_action")

    monkeypatch.setattr(model, "config", replace(model.config, pace="on_action"))
    serve(model, body)


def test_chunks_have_the_outcome_of_their_round(
    make_model: Callable[..., WorldModel], model: WorldModel
) -> None:
    async def outcomes(server: Server, found: list[Any]) -> None:
        async with server.client() as client:
            await client.start(seed=3)
            found.append((await client.until("video.chunk_metadata"))["outcome"])
            await client.act("e1", {"keys": ["left"]})
            found.append((await client.until("video.chunk_metadata"))["outcome"])

    scored, found, none = make_model(outcomes=True), list[Any](), list[Any]()
    serve(scored, lambda server: outcomes(server, found))
    session = scored.session(seed=3)
    session.reset(text="a red ball")
    session.step({"keys": ["left"]})
    assert session.outcome is not None
    assert found[0] is None
    assert found[1] == {
        "reward": pytest.approx(session.outcome.reward, abs=1e-2),
        "ended": session.outcome.ended,
    }
    serve(model, lambda server: outcomes(server, none))
    assert none == [None, None]


@pytest.mark.parametrize("num_frames", [None, 25])
def test_a_running_world_waits_after_the_end_of_an_episode(
    make_model: Callable[..., WorldModel], num_frames: int | None
) -> None:
    """Its model was trained on nothing after it; an action, or a number of frames, goes on."""
    ending = fast(make_model(outcomes=True), 40)
    assert ending.state is not None and ending.state.outcome is not None
    ending.state.outcome.out.bias[-1] = 10

    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(pace="realtime", num_frames=num_frames)
            assert (await client.until("video.chunk_metadata"))["round"] == 0
            assert (await client.until("video.chunk_metadata"))["outcome"]["ended"]
            if num_frames:
                assert (await client.until("session.done"))["reason"] == "num_frames"
                return
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):  # five chunks
                    await client.event()
            await client.act("e", "the red ball jumps")
            assert (await client.until("video.chunk_metadata"))["round"] == 2
            await client.send("session.undo", round=0)
            assert (await client.until("video.chunk_metadata"))["source"] == "undo"
            assert (await client.until("video.chunk_metadata"))["round"] == 1  # it runs again

    serve(ending, body)


def test_mp4_segments_join_to_a_video(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            start = await client.start(format="fmp4")
            assert start["content_type"].startswith('video/mp4; codecs="avc1.')
            video, frames = b"".join(start["media"]), 0
            for index in range(3):
                chunk = await client.until("video.chunk_metadata")
                assert chunk["num_messages"] == 1
                video, frames = video + chunk["media"][0], frames + chunk["num_frames"]
                await client.act(f"e{index}", None)
            with av.open(io.BytesIO(video)) as container:
                assert len(list(container.decode(video=0))) == frames

    serve(model, body)


def test_pacing_is_one_chunk_ahead_at_most(make_model: Callable[..., WorldModel]) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(pace="realtime")
            arrived, ends, began = [], 0.0, [0.0]
            for _ in range(6):
                chunk = await client.until("video.chunk_metadata")
                arrived.append(time.monotonic())
                began.append(max(ends, arrived[-1]))
                ends = began[-1] + chunk["num_frames"] / 20
            # Chunk k may arrive once the one before it is being shown, and no earlier.
            assert all(now >= start - 0.05 for now, start in zip(arrived[1:], began[1:-1], strict=True)), (
                arrived
            )
            assert arrived[-1] - arrived[1] > 3 * 8 / 20
            await client.send("session.update", pace="on_action", event_id="pause")
            assert (await client.until("session.updated"))["event_id"] == "pause"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.socket.recv(), 1.0)
            await client.send("session.update", pace="realtime")
            await client.until("video.chunk_metadata")
        text = server.context.metrics.text().decode()
        assert "worldmodel_time_to_first_chunk_seconds_count 1.0" in text
        assert "worldmodel_chunk_seconds_count 6.0" in text

    serve(fast(make_model(), 20), body)


def test_action_takes_effect_with_the_next_chunk(make_model: Callable[..., WorldModel]) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(pace="realtime")
            await client.until("video.chunk_metadata")
            chunk = await client.until("video.chunk_metadata")
            assert chunk["action"] is None and chunk["event_ids"] == []
            await client.act("e", "the red ball jumps")
            applied = await client.until("session.interaction.applied")
            assert applied["frame"] >= chunk["first_frame"] + 8
            assert (await client.event())["action"]["text"] == "the red ball jumps"

    serve(fast(make_model(), 20), body)


def test_an_action_replaces_the_chunk_that_is_generated_without_one(
    make_model: Callable[..., WorldModel],
) -> None:
    async def body(server: Server) -> None:
        occupancy = server.service.denoising.occupancy
        async with server.client() as client:
            await client.start(pace="realtime", num_inference_steps=64)
            while occupancy.steps < 64 + 3:  # the first chunk shows the text
                await asyncio.sleep(0.001)
            await client.act("e", "the red ball jumps")
            await client.until("session.interaction.applied")
            chunk = await client.event()
            assert (chunk["round"], chunk["action"]["text"]) == (1, "the red ball jumps")
            assert occupancy.cancelled == 1

    serve(make_model(), body)


def test_asap_plays_actions_without_waiting_for_playback(make_model: Callable[..., WorldModel]) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(pace="asap")
            await client.until("video.chunk_metadata")
            began = time.monotonic()
            for index in range(3):
                await client.act(f"e{index}", None)
                assert (await client.until("video.chunk_metadata"))["round"] == index + 1
            assert time.monotonic() - began < 10  # 3 chunks last 24 s
            await client.send("session.update", pace="on_action")

    serve(fast(make_model(), 1), body)


def test_sessions_learn_that_the_server_stops(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as idle, server.client() as client:
            await client.start(pace="realtime")
            server.context.stop_sessions()
            for each in (client, idle):
                assert (await each.until("session.done"))["reason"] == "server_stopping"
                assert await each.closed() == 1001

    serve(model, body)


def test_snapshot_and_restore(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start()
            await client.act("one", "the red ball moves left")
            await client.until("session.interaction.applied")
            await client.until("video.chunk_metadata")
            await client.send("session.snapshot", event_id="s")
            kept = await client.until("session.snapshot.created")
            assert (kept["event_id"], kept["round"]) == ("s", 1)
            await client.act("two", "the blue box jumps")
            after = await client.until("video.chunk_metadata")
            await client.send("session.restore", snapshot=kept["snapshot"])
            assert (await client.until("session.restored"))["round"] == 1
            back = await client.event()
            assert (back["source"], back["round"]) == ("restore", 1)
            assert back["first_frame"] == after["first_frame"] + after["num_frames"]
            await client.act("again", "the blue box jumps")
            again = await client.until("video.chunk_metadata")
            assert again["round"] == 2
            assert again["media"] == after["media"]
            await client.send("session.restore", snapshot="snapshot-none", event_id="r")
            error = await client.refused()
            assert "no snapshot" in error["message"] and error["event_id"] == "r" and not error["fatal"]

    serve(model, body)


def test_undo_goes_back_round_by_round(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:

            async def play(name: str, action: str) -> dict[str, Any]:
                await client.act(name, action)
                return await client.until("video.chunk_metadata")

            async def undo(**fields: Any) -> dict[str, Any]:
                await client.send("session.undo", event_id="u", **fields)
                undone = await client.until("session.undone")
                chunk = await client.event()
                assert (undone["event_id"], chunk["source"]) == ("u", "undo")
                assert chunk["round"] == undone["round"]
                return chunk

            async def nothing(**fields: Any) -> str:
                await client.send("session.undo", event_id="n", **fields)
                error = await client.refused()
                assert (error["event_id"], error["fatal"]) == ("n", False)
                return error["message"]

            await client.start(pace="asap", num_inference_steps=1)
            shown = [await client.until("video.chunk_metadata")]
            assert "nothing to undo" in await nothing()
            shown += [await play(f"e{index}", f"action {index}") for index in range(4)]
            back = await undo()
            assert (back["round"], back["media"]) == (3, shown[3]["media"])
            assert back["first_frame"] == shown[4]["first_frame"] + shown[4]["num_frames"]
            again = await play("again", "action 3")
            assert (again["round"], again["media"]) == (4, shown[4]["media"])
            assert (await undo(round=1))["media"] == shown[1]["media"]
            assert (await undo(round=1))["round"] == 1  # it is there
            assert "0 to 1" in await nothing(round=2)
            assert (await play("other", "the blue box jumps"))["media"] != shown[2]["media"]
            assert (await undo(round=0))["media"] == shown[0]["media"]
            assert "nothing to undo" in await nothing()
            await play("e", "action 0")
            await client.send("session.snapshot")
            name = (await client.until("session.snapshot.created"))["snapshot"]
            await play("f", "action 1")
            await client.send("session.restore", snapshot=name)
            assert (await client.until("video.chunk_metadata"))["media"] == shown[1]["media"]
            assert "nothing to undo" in await nothing()
            for round_ in (-1, "x", 1.5):
                await client.send("session.undo", round=round_)
                assert "round" in (await client.refused())["message"]

    serve(model, body)


def test_as_many_rounds_can_be_undone_as_there_are_snapshots(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(pace="asap", num_inference_steps=1)
            await client.until("video.chunk_metadata")
            for index in range(4):
                await client.act(f"e{index}", None)
                await client.until("video.chunk_metadata")
            await client.send("session.undo", round=1)
            assert "2 to 4" in (await client.refused())["message"]
            for round_ in (3, 2):
                await client.send("session.undo")
                assert (await client.until("session.undone"))["round"] == round_
            await client.send("session.undo")
            assert "nothing to undo" in (await client.refused())["message"]

    serve(model, body, limits={"max_snapshots": 2})


@pytest.mark.parametrize("pace", ["realtime", "on_action"])
def test_undo_gives_up_the_chunk_that_is_generated(make_model: Callable[..., WorldModel], pace: str) -> None:
    """With its action, and those that wait; the world stays usable, and is paused before."""

    async def body(server: Server) -> None:
        occupancy = server.service.denoising.occupancy
        async with server.client() as client:
            await client.start(pace="on_action")
            start = await client.until("video.chunk_metadata")
            await client.act("one", "the red ball moves left")
            first = await client.until("video.chunk_metadata")
            began = occupancy.steps
            if pace == "realtime":
                await client.send("session.update", pace=pace)
                await client.until("session.updated")
            else:
                await client.act("two", "the red ball jumps")
                await client.act("three", None)
            while occupancy.steps < began + 3:
                await asyncio.sleep(0.001)
            await client.send("session.update", pace="on_action")
            await client.send("session.undo")
            assert (await client.until("session.undone"))["round"] == 0
            back = await client.event()
            assert (back["source"], back["media"]) == ("undo", start["media"])
            assert occupancy.cancelled == 1
            kind = "session.interaction.dropped"
            dropped = [(each["event_id"], each["reason"]) for each in client.seen if each["type"] == kind]
            assert dropped == ([] if pace == "realtime" else [("two", "undone"), ("three", "undone")])
            assert sum(each["type"] == "video.chunk_metadata" for each in client.seen) == 3
            await client.act("again", "the red ball moves left")
            again = await client.until("video.chunk_metadata")
            assert (again["round"], again["media"]) == (1, first["media"])

    serve(make_model(num_inference_steps=32), body)


def test_an_undo_that_is_refused_drops_nothing(make_model: Callable[..., WorldModel]) -> None:
    async def body(server: Server) -> None:
        occupancy = server.service.denoising.occupancy
        async with server.client() as client:
            await client.start(num_inference_steps=16)
            await client.until("video.chunk_metadata")
            began = occupancy.steps
            for name in ("one", "two"):
                await client.act(name, "the red ball jumps")
            while occupancy.steps < began + 3:
                await asyncio.sleep(0.001)
            await client.send("session.undo")
            assert "nothing to undo" in (await client.refused())["message"]
            for name in ("one", "two"):
                chunk = await client.until("video.chunk_metadata")
                assert chunk["event_ids"] == [name]

    serve(make_model(), body)


def test_describe_and_ping(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        session = model.session()
        session.reset(text="a red ball")
        async with server.client() as client:
            await client.send("session.ping", event_id="early")
            assert (await client.until("session.pong"))["event_id"] == "early"
            await client.start()
            await client.send("session.describe", question="how many", event_id="d")
            said = await client.until("session.described")
            assert (said["text"], said["event_id"]) == (session.describe("how many"), "d")
            assert len(server.context.worlds) == 1

    serve(model, body)


# ---- what is refused -------------------------------------------------------------------------------------


def test_invalid_events_do_not_end_the_session(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.act("early", "wait")
            assert (await client.refused())["event_id"] == "early"
            for named, kind, fields in (
                ("text or from an upload", "session.start", {}),
                ("text or from an upload", "session.start", {"text": "a", "upload": True}),
                ("seed", "session.start", {"text": "a", "seed": -1}),
                ("guidance_scale", "session.start", {"text": "a", "guidance_scale": float("nan")}),
                ("path", "session.start", {"text": "a", "path": "/etc/passwd"}),
                ("type", "session.begin", {}),
            ):
                await client.send(kind, **fields)
                error = await client.refused()
                assert named in error["message"] and not error["fatal"]
            await client.socket.send(b"\x89PNG")
            assert (await client.refused())["code"] == "out_of_order"
            await client.start()
            await client.send("session.start", text="another")
            assert (await client.refused())["code"] == "out_of_order"
            for named, action in (
                ("did you mean 'left'", {"keys": ["lef"]}),
                ("pass 3", {"vector": [1.0]}),
                ("empty", " "),
                ("keys", {"keys": 7}),
                ("key", {"key": ["left"]}),
                ("64", "left " * 200),
            ):
                await client.act("bad", action)
                error = await client.refused()
                assert named in error["message"], error
                assert not error["fatal"]
            await client.act("good", {"keys": ["left", "right"]})
            assert (await client.until("session.interaction.applied"))["round"] == 1

    serve(model, body)


def test_action_queue_is_bounded_and_replaceable(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(num_inference_steps=20)
            for index in range(6):
                await client.act(f"e{index}", None)
            await client.act("last", None, replace=True)
            while (event := await client.event())["type"][-8:] != ".applied" or event["event_id"] != "last":
                continue
            named = {
                kind: {each["event_id"] for each in client.seen if each["type"].endswith(kind)}
                for kind in ("queued", "applied", "dropped", "error")
            }
            assert {e["error"]["code"] for e in client.seen if e["type"] == "error"} == {"queue_full"}
            assert named["dropped"]
            assert named["queued"] == named["applied"] ^ named["dropped"]
            assert named["queued"] | named["error"] == {*(f"e{index}" for index in range(6)), "last"}

    serve(model, body, limits={"max_queued_interactions": 3})


def test_start_that_is_refused_can_be_sent_again(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            for data, code in (
                (b"not an image", "unsupported_format"),
                (b"\x89PNG\r\n\x1a\n", "invalid_request"),
            ):
                await client.send("session.start", upload=True, event_id=code)
                await client.socket.send(data)
                error = await client.refused()
                assert (error["code"], error["event_id"], error["fatal"]) == (code, code, False)
            await client.send("session.start", text="a ball", adapter="none")
            error = await client.refused()
            assert "no adapter" in error["message"] and not error["fatal"]
            await client.start()

    serve(model, body, max_worlds_per_key=1)


def test_failed_start_closes_the_session(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as first, server.client() as second:
            await first.start()
            await second.send("session.start", text="a ball")
            error = await second.refused()
            assert error["type"] == "rate_limit_error" and error["fatal"]
            assert await second.closed() == 1013
            await first.send("session.stop")
            await first.until("session.done")
            async with server.client() as third:
                await third.start()

    serve(model, body, max_worlds_per_key=1)


@pytest.mark.parametrize(
    ("limits", "reason", "pace"),
    [
        ({"idle_timeout_s": 0.4}, "idle", "on_action"),
        ({"start_timeout_s": 0.3}, "start_timeout", None),
        ({"max_session_s": 0.5}, "session_limit", "on_action"),
    ],
)
def test_timeouts_end_the_session(
    model: WorldModel, limits: dict[str, Any], reason: str, pace: str | None
) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            if pace:
                await client.start(pace=pace)
                await client.send("session.ping")
            done = await client.until("session.done")
            assert done["reason"] == reason
            assert await client.closed() == 1000

    serve(model, body, limits=limits)


def test_a_client_that_only_watches_is_not_idle(make_model: Callable[..., WorldModel]) -> None:
    fast = make_model()
    fast.config = replace(fast.config, fps=4 * fast.config.fps)

    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(pace="realtime")
            for _ in range(6):  # a quarter of a second each
                await client.until("video.chunk_metadata")
            await client.send("session.update", pace="on_action")
            assert (await client.until("session.done"))["reason"] == "idle"

    serve(fast, body, limits={"idle_timeout_s": 0.7})


def test_frames_that_nobody_looks_at_are_not_played(make_model: Callable[..., WorldModel]) -> None:
    fast = make_model()
    fast.config = replace(fast.config, fps=4 * fast.config.fps)
    chunk = fast.config.chunk_frames

    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.start(pace="realtime")
            chunks = [await client.until("video.chunk_metadata") for _ in range(6)]  # without a word
            await client.send("session.playback", frames=10**6)
            assert "were sent" in (await client.refused())["message"]
            shown = chunks[-1]["first_frame"]
            await client.send("session.playback", frames=shown)
            sent = shown
            with suppress(TimeoutError):
                async with asyncio.timeout(1.5):
                    while True:
                        event = await client.until("video.chunk_metadata")
                        sent = event["first_frame"] + event["num_frames"]
            # Those that wait while it is behind, and what was on its way when it said so.
            assert sent - shown <= max(2 * chunk, fast.config.fps / 2) + 3 * chunk
            await asyncio.sleep(0.5)
            await client.send("session.playback", frames=shown - chunk)  # out of order
            await client.act("e", "go on")  # actions do not wait
            assert (await client.until("video.chunk_metadata"))["first_frame"] == sent
            await client.send("session.playback", frames=sent)
            for _ in range(2):
                await client.until("video.chunk_metadata")
            await client.send("session.stop")
            await client.until("session.done")

    serve(fast, body)


def test_a_dropped_socket_can_come_back_to_its_world(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            resume_id = (await client.start(resumable=True))["resume_id"]
            assert resume_id
            await client.act("e", None)
            before = await client.until("video.chunk_metadata")
            while before["round"] < 1:
                before = await client.until("video.chunk_metadata")
            client.socket.transport.abort()  # as if the network were gone
        await asyncio.sleep(0.1)
        assert len(server.context.worlds) == 1
        async with server.client() as other:
            await other.send("session.start", resume_id=resume_id, text="a ball")
            assert (await other.refused())["code"] == "invalid_event"
            await other.send("session.start", resume_id=resume_id, pace="on_action")
            assert (await other.until("video.start"))["resume_id"] != resume_id
            again = await other.until("video.chunk_metadata")
            assert (again["round"], again["media"]) == (1, before["media"])
            await other.act("f", None)
            assert (await other.until("video.chunk_metadata"))["round"] == 2
            await other.send("session.stop")
            await other.until("session.done")
        assert await server.freed()  # as it was closed, and not dropped
        async with server.client() as late:
            await late.send("session.start", resume_id=resume_id)
            assert (await late.refused())["code"] == "not_found"

    serve(model, body)


def test_a_world_goes_on_over_http_and_on_a_socket(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        session = model.session(seed=5, num_inference_steps=2)
        session.reset(text="a red ball")
        truth = [session.step(action).frames for action in ACTIONS]
        async with server.client() as client:
            await client.start(seed=5, num_inference_steps=2, format="png")
            for number in range(2):
                await client.act(f"e{number}", ACTIONS[number])
                await client.until("session.interaction.applied")
                assert np.array_equal(shown(await client.event()), truth[number])
            await client.send("session.fork", event_id="f")
            forked = await client.until("session.forked")
            assert (forked["event_id"], forked["round"]) == ("f", 2)
        # The copy stays when the socket is closed.
        worlds = server.context.worlds
        entry = await worlds.get(ANONYMOUS, forked["world"])
        assert np.array_equal(await worlds.step(entry, 3, ACTIONS[2]), truth[2])
        async with server.client() as other:
            await other.send("session.start", world=forked["world"], seed=1)
            assert (await other.refused())["code"] == "invalid_event"
            await other.send("session.start", world=forked["world"], format="png", pace="on_action")
            assert (await other.until("video.start"))["seed"] == 5
            chunk = await other.until("video.chunk_metadata")
            assert chunk["round"] == 3 and np.array_equal(shown(chunk), truth[2])
            await other.act("last", ACTIONS[3])
            assert np.array_equal(shown(await other.until("video.chunk_metadata")), truth[3])
        assert entry.world.round == 3, "a copy was played"
        # What began on a socket can begin again.
        first = model.session(seed=5, num_inference_steps=2).reset(text="a red ball")
        assert np.array_equal(await worlds.reset(entry, None), first)
        await worlds.close(entry)
        async with server.client() as late:
            await late.send("session.start", world=forked["world"])
            assert (await late.refused())["code"] == "not_found"

    serve(model, body)


def test_a_dropped_world_ends_after_its_time(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        server.context.worlds.keep_s = 0.3
        async with server.client() as client:
            await client.start(resumable=True)
            client.socket.transport.abort()
        await asyncio.sleep(0.1)
        assert len(server.context.worlds) == 1
        assert await server.freed()

    serve(model, body)


def test_round_limit_ends_the_session(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        server.service.max_rounds = 1
        async with server.client() as client:
            await client.start()
            await client.act("e", None)
            done = await client.until("session.done")
            assert (done["rounds"], done["reason"]) == (1, "round_limit")

    serve(model, body)


# ---- what a session leaves behind ------------------------------------------------------------------------


def test_disconnect_stops_generation_within_a_step(make_model: Callable[..., WorldModel]) -> None:
    async def body(server: Server) -> None:
        occupancy = server.service.denoising.occupancy
        async with server.client() as client:
            await client.send("session.start", text="a ball", num_inference_steps=64, pace="on_action")
            await client.until("video.chunk_metadata")
            before = occupancy.steps
            await client.act("e", None)
            while occupancy.steps < before + 3:
                await asyncio.sleep(0.001)
        assert await server.freed()
        steps = occupancy.steps
        await asyncio.sleep(0.2)
        assert occupancy.cancelled == 1
        assert occupancy.steps <= steps + 1 < before + 64
        assert len(server.context.worlds) == 0

    serve(make_model(), body)


def test_slow_client_times_out(model: WorldModel) -> None:
    async def body(server: Server) -> None:
        named: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        @server.app.websocket("/pour")
        async def pour(websocket: WebSocket) -> None:
            await websocket.accept()
            sender, sent = EventSender(websocket, 0.3), 0
            try:
                while sent < 100:
                    await sender.send(events.SessionPong(), bytes(2**20))
                    sent += 1
            except SlowClientError:
                named.set_result(sent)
            with pytest.raises(SlowClientError):  # what was cut off must not be followed by anything
                await sender.send(events.SessionPong())
            await sender.close(1008)

        # A bare socket, which reads no more than a little: a library would read on behind the test's back.
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**16)
        writer.write(
            b"GET /pour HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert await asyncio.wait_for(named, 20) < 50
        writer.close()

    serve(model, body)
