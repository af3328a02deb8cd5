"""A model that fails or hangs: what clients and probes are told, and what becomes of the work."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_client import LocalClient
from served import Process, Processes

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

PATIENCE_S = 60.0
BROKEN_SERVER = Path(__file__).parents[1] / "shared" / "broken_server.py"
VIDEO = {"prompt": "a red ball", "num_frames": 16}
LONG = {**VIDEO, "num_frames": 256, "num_inference_steps": 16}
"""Still in progress when the model breaks."""


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def before_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Any], Any]], None]:
    """Lets a function see what a call of a round gets, before it runs."""

    def see(name: str, function: Callable[[Any], Any]) -> None:
        call = getattr(WorldService, name)
        monkeypatch.setattr(WorldService, name, lambda self, rows: (function(rows), call(self, rows))[1])

    return see


def serve(model: WorldModel, folder: Path, **limits: Any) -> LocalClient:
    app = create_app(WorldService(model), ServerConfig("tiny", folder, **limits))
    return LocalClient(app, raise_server_exceptions=False)


def test_a_server_whose_rounds_fail_is_not_ready_and_fails_no_order(
    model: WorldModel, tmp_path: Path, before_calls: Any
) -> None:
    broken = False

    def fail(_: Any) -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    before_calls("_finished", fail)
    with serve(model, tmp_path) as api:
        world = api.post("/v1/worlds", json={"text": "a ball"}).json()["id"]
        broken = True
        videos = [api.post("/v1/videos", json=VIDEO).json()["id"] for _ in range(3)]
        wait_until(lambda: api.get("/ready").json() == {"status": "failing"})
        assert (api.get("/ready").status_code, api.get("/health").status_code) == (503, 503)
        assert api.post(f"/v1/worlds/{world}/step", json={"step_id": 1}).status_code == 503
        wait_until(lambda: all(api.get(f"/v1/videos/{each}").json()["status"] == "queued" for each in videos))


def test_an_input_that_makes_calls_fail_does_not_end_the_server(
    model: WorldModel, tmp_path: Path, before_calls: Any
) -> None:
    """Otherwise one client could end it."""

    def fail(rows: Sequence[Any]) -> None:
        if any("bad" in str(action) for _, action in rows):
            raise IndexError("an error of ours that this input shows")

    before_calls("_prepared", fail)
    with serve(model, tmp_path) as api:
        world = api.post("/v1/worlds", json={"text": "a ball"}).json()["id"]
        bad = {"step_id": 1, "action": "bad"}
        assert [api.post(f"/v1/worlds/{world}/step", json=bad).status_code for _ in range(4)] == [500] * 4
        order = api.post("/v1/videos", json={"prompt": "bad", "num_frames": 8}).json()["id"]
        wait_until(lambda: api.get(f"/v1/videos/{order}").json()["status"] == "failed")
        assert api.get("/ready").json() == {"status": "ok"}
        assert api.post(f"/v1/worlds/{world}/step", json={"step_id": 1}).status_code == 200


def test_a_call_that_does_not_return_is_told_to_all_who_wait(
    model: WorldModel, tmp_path: Path, before_calls: Any
) -> None:
    broken, returns = False, threading.Event()
    before_calls("_finished", lambda _: broken and returns.wait(PATIENCE_S))
    with serve(model, tmp_path, step_deadline_s=1.0) as api, ThreadPoolExecutor(2) as threads:
        worlds = [api.post("/v1/worlds", json={"text": "a ball"}).json()["id"] for _ in range(2)]
        video = api.post("/v1/videos", json={**VIDEO, "num_frames": 800}).json()["id"]
        wait_until(lambda: api.get(f"/v1/videos/{video}").json()["status"] == "in_progress")
        broken = True
        steps = [
            threads.submit(api.post, f"/v1/worlds/{world}/step", json={"step_id": 1}) for world in worlds
        ]
        wait_until(lambda: api.get("/ready").json() == {"status": "stuck"})
        assert {step.result().status_code for step in steps} <= {503, 504}
        wait_until(lambda: api.get(f"/v1/videos/{video}").json()["status"] == "queued")
        assert (api.get("/ready").status_code, api.get("/health").status_code) == (503, 503)
        returns.set()


Start = Callable[..., Process]


@pytest.fixture
def start(servers: Processes, model_folder: Path, tmp_path: Path) -> Start:
    """Starts replicas with one database; one that is given a file breaks when it appears."""
    database = f"sqlite:///{tmp_path / 'server.db'}"

    def run(*broken: str, options: Sequence[str] = ()) -> Process:
        module = [str(BROKEN_SERVER), *broken] if broken else ["-m", "worldmodel"]
        return servers.start(model_folder, "--database", database, *options, module=module)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_broken_replica_costs_no_order_and_ends(start: Start, tmp_path: Path, how: str) -> None:
    """Its orders, those that it takes while it breaks, and its worlds go on at the healthy one."""
    flag, limits = tmp_path / "broken", ("--step-deadline-s", "4", "--drain-timeout-s", "3")
    broken, one = start(how, str(flag), options=limits)
    _, two = start()
    world = one.post("/v1/worlds", json={"text": "a ball"}).json()["id"]
    assert one.post(f"/v1/worlds/{world}/step", json={"step_id": 1}).status_code == 200
    before = [one.post("/v1/videos", json={**LONG, "seed": seed}).json()["id"] for seed in range(4)]
    flag.touch()
    after = [two.post("/v1/videos", json={**VIDEO, "seed": seed}).json()["id"] for seed in range(4, 8)]
    began = time.monotonic()
    assert broken.wait(timeout=30) == 1
    done = [each["status"] for each in two.get("/v1/videos").json()["data"]]
    while {"queued", "in_progress"} & set(done):
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.1)
        done = [each["status"] for each in two.get("/v1/videos").json()["data"]]
    assert done == ["completed"] * len([*before, *after])
    assert two.post(f"/v1/worlds/{world}/step", json={"step_id": 2}).status_code == 200


@pytest.mark.slow
def test_a_hung_server_ends_when_it_is_told_to(start: Start, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    hung, client = start("hangs", str(flag), options=("--drain-timeout-s", "2"))
    world = client.post("/v1/worlds", json={"text": "a ball"}).json()["id"]
    flag.touch()
    with pytest.raises(httpx.TimeoutException):
        client.post(f"/v1/worlds/{world}/step", json={"step_id": 1}, timeout=1)
    hung.terminate()
    assert hung.wait(timeout=30) == 1
