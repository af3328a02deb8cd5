"""The client messages that vLLM-Omni documents for `WS /v1/realtime/video`, played against our server.

Source: docs/serving/streaming_video_output_api.md of vLLM-Omni and the README of its example
streaming_video_generation, with the frame size, frame rate and name of the model that is served here.
"""

import base64
import io

import av
import numpy as np
from realtime_sessions import Server, serve

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.media import decoding

START = {
    "model": "tiny",
    "prompt": "A serene lakeside sunrise",
    "format": "m4s",
    "width": 32,
    "height": 32,
    "fps": 8,
    "num_frames": 33,
}
PROMPT = {"event_id": "sunlight-update", "event": {"prompt": "Sunlight breaks through the mist"}}
CAMERA = {"mode": "target", "data": {"translation": [0.0, 0.0, 1.0], "rotation": [0.0, 0.0, 0.0, 1.0]}}


def num_frames(video: bytes) -> int:
    with av.open(io.BytesIO(video)) as container:
        return len(list(container.decode(video=0)))


def test_the_documented_sequence_of_vllm_omni(world: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            await client.send("session.start", **START, pace="on_action")
            start = await client.until("video.start")
            assert (start["format"], start["num_messages"]) == ("m4s", 0)
            chunk = await client.until("video.chunk_metadata")
            video, frames = b"".join(chunk["media"]), chunk["num_frames"]
            await client.send("session.ping")
            await client.until("session.pong")

            await client.send("session.interaction", interaction=PROMPT | {"transition_chunks": 2})
            error = await client.refused()
            assert error["event_id"] == "sunlight-update"
            assert "transition_chunks is 2" in error["message"]
            assert not error["fatal"]

            camera = {"event": {"multi_modal_data": {"camera": CAMERA}}}
            both = {"event": {"prompt": "go on", "multi_modal_data": {"camera": CAMERA}}}
            for interaction in (PROMPT | {"transition_chunks": 0}, PROMPT, camera, both):
                await client.send("session.interaction", interaction=interaction)
                queued = await client.until("session.interaction.queued")
                assert queued["event_id"] == interaction.get("event_id", queued["event_id"]) != ""
                chunk = await client.until("video.chunk_metadata")
                assert chunk["event_ids"] == [queued["event_id"]]
                event = interaction["event"]
                assert chunk["action"]["text"] == event.get("prompt")
                assert bool(chunk["action"]["camera"]) == ("multi_modal_data" in event)
                assert len(chunk["media"]) == 1
                video, frames = video + chunk["media"][0], frames + chunk["num_frames"]
            done = await client.until("session.done")
            assert (done["reason"], done["frames"]) == ("num_frames", frames)
            # The binary messages in the order in which they came are one fragmented MP4.
            assert num_frames(video) == frames >= 33

    serve(world, body)


def test_an_image_reference_starts_the_world_and_the_prompt_is_the_first_action(
    world: WorldModel, image: np.ndarray
) -> None:
    async def body(server: Server) -> None:
        png = base64.b64encode(encoding.encode_png(image)).decode()
        reference = {"image_url": f"data:image/png;base64,{png}"}
        async with server.client() as client:
            await client.send("session.start", image_reference=reference, prompt="go on", format="m4s")
            chunk = await client.until("video.chunk_metadata")
            assert (chunk["source"], chunk["num_frames"], chunk["action"]) == ("start", 1, None)
            chunk = await client.until("video.chunk_metadata")
            assert (chunk["round"], chunk["action"]["text"]) == (1, "go on")
            await client.send("session.stop")
            assert (await client.until("session.done"))["reason"] == "stopped"

    try:
        serve(world, body)
    finally:
        decoding.close_decoder()


def test_what_this_server_cannot_do_is_refused_by_name(world: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            for named, fields in (
                ("width is 640", START | {"width": 640}),
                ("fps is 16", START | {"fps": 16}),
                ("no model with this name", START | {"model": "BestWishYsh/Helios-Distilled"}),
                (
                    "image_reference.image_url",
                    START | {"image_reference": {"image_url": "https://a.b/c.png"}},
                ),
                ("extra_params", START | {"extra_params": {}}),
                ("streaming_buffer_seconds", START | {"streaming_buffer_seconds": 1.25}),
            ):
                await client.send("session.start", **fields)
                error = await client.refused()
                assert named in error["message"]
                assert not error["fatal"]
            await client.send("session.start", **START)
            await client.until("video.start")
            for event in ({}, {"action": "go on", "prompt": "go on"}, {"multi_modal_data": {}}):
                await client.send("session.interaction", interaction={"event": event})
                assert (await client.refused())["code"] == "invalid_event"

    serve(world, body)
