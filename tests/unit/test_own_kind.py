"""A sixth kind of action, which one class defines, works in every part of the package."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from joystick import Joystick
from runs import changed

from worldmodel import config as configs
from worldmodel.actions import Action, ActionKind, action_kinds, register_action_kind, registry
from worldmodel.actions.words import say, understand
from worldmodel.cli.info import action_facts
from worldmodel.config import (
    ActionConfig,
    DataConfig,
    SourceConfig,
    TrainConfig,
    TrainedConfig,
    WorldModelConfig,
)
from worldmodel.data.sources import open_source
from worldmodel.env import WorldEnv
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.recording import record_environment
from worldmodel.recording.settings import EnvironmentSettings
from worldmodel.rollout.action_list import parse_action
from worldmodel.train import finetune

PUSHED = {"joystick": {"axes": [0.5, -1.0], "button": True}}
BAD: list[tuple[Any, str]] = [
    ({"joystick": 3}, "axes"),
    ({"joystick": {"button": True}}, "axes"),
    ({"joystick": {"axes": [0, 2]}}, "[0.0, 2.0]"),
    ({"joystick": {"axes": [math.nan, 0]}}, "nan"),
]


@pytest.fixture(autouse=True)
def joystick(monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionKind]:
    before = dict(registry._KINDS)
    register_action_kind(Joystick())
    yield registry.action_kind("joystick")
    registry._KINDS.clear()
    registry._KINDS.update(before)


@pytest.fixture
def stick(make_model: Callable[..., WorldModel]) -> WorldModel:
    return make_model(action=ActionConfig(keys=("jump",), joystick=True, text={"max_tokens": 64}))


def test_a_session_plays_and_saves_it(stick: WorldModel, image: np.ndarray, tmp_path: Path) -> None:
    session = stick.session(seed=3)
    session.reset(image)
    other = session.fork()
    played = session.step(PUSHED).frames
    assert not np.array_equal(played, other.step({"joystick": {"axes": [-1, 1]}}).frames)
    again = WorldModel.from_pretrained(stick.save_pretrained(tmp_path, dtype=torch.float32)).session(seed=3)
    assert again.model.config.action == stick.config.action
    again.reset(image)
    assert np.array_equal(again.step(Action(joystick=(0.5, -1.0, True))).frames, played)


def test_bad_values_are_refused(stick: WorldModel, image: np.ndarray) -> None:
    session = stick.session(seed=3)
    session.reset(image)
    for value, named in BAD:
        with pytest.raises(InputError, match=re.escape(named)) as raised:
            session.step(value)
        assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
    with pytest.raises(InputError, match="takes no joystick"):
        Action.of(PUSHED).check(ActionConfig())
    with pytest.raises(ConfigError, match="'often'"):
        ActionConfig(joystick="often")


def test_it_is_said_and_understood() -> None:
    takes = ActionConfig(joystick=True)
    action = Action.of({"text": "go on", **PUSHED})
    assert say(action) == "go on; joystick 0.5 -1 1"
    assert understand(say(action), takes) == action
    assert understand("joystick 3 0 0", takes) == Action(joystick=(1.0, 0.0, False))
    assert understand("joystick 3 0 0", ActionConfig()) == Action()


def test_configs_and_the_command_line_know_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {action: {text: false, joystick: true}}")
    config = configs.load(file)
    assert config.model.action.takes == {kind.name: kind.name == "joystick" for kind in action_kinds()}
    written = json.loads(json.dumps(configs.to_dict(config)))
    assert configs.build(TrainConfig, written) == config
    assert parse_action('joystick:{"axes": [0.5, -1], "button": true}') == Action.of(PUSHED)
    assert action_facts(config.model.action)["joystick"] == "yes"


def test_it_is_a_space_of_the_environment(stick: WorldModel, image: np.ndarray) -> None:
    env = WorldEnv(stick, start={"observation": image}, actions=("joystick", "key"))
    env.reset(seed=1)
    seed = env.reset(seed=1)[1]["world_seed"]
    session = stick.session(seed)
    session.reset(image)
    element = {"joystick": np.float32([0.5, -1, 1]), "key": 0}
    assert env.action_space.contains(element)
    assert np.array_equal(env.step(element)[0], session.step({"keys": ["jump"], **PUSHED}).frames[-1])


class Stick(gymnasium.Env):
    """A grey picture that the first axis makes brighter."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012
    observation_space = spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = spaces.Box(np.float32([-1, -1, 0]), np.float32([1, 1, 1]))
    action_specs = [{"name": name, "kind": "joystick"} for name in ("x", "y", "button")]  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.grey = render_mode, 128.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.grey = 128.0
        return self.render(), {}

    def step(self, action: Any) -> Any:
        self.grey = float(np.clip(self.grey + 40 * action[0], 0, 255))
        return self.render(), 0.0, False, False, {}

    def render(self) -> np.ndarray:
        return np.full((32, 32, 3), self.grey, np.uint8)


@pytest.mark.parametrize("format", ["lerobot", "clips"])
def test_it_is_recorded_and_read_back(format: Any, stick: WorldModel, tmp_path: Path) -> None:
    made = record(tmp_path, format)
    model = config_of(stick)
    source = open_source("mine", DataConfig({"mine": source_of(made, format)}), model)
    actions = source.at(0).episode("rounds", 0, 0, 6).actions
    played = [action.joystick for action in actions]
    assert len(played) == 6 and len(set(played)) > 3 and {len(each) for each in played} == {3}


def record(folder: Path, format: Any) -> Path:
    if "Stick-v0" not in gymnasium.registry:
        gymnasium.register("Stick-v0", Stick)
    return record_environment(EnvironmentSettings("Stick-v0", max_steps=6), folder / "recorded", 2, format)


def config_of(model: WorldModel) -> WorldModelConfig:
    codec = replace(model.config.codec, temporal_factor=1)
    return replace(model.config, codec=codec, chunk_frames=1, fps=8)


def source_of(made: Path, format: str) -> SourceConfig:
    if format == "lerobot":
        return SourceConfig("lerobot", str(made))
    return SourceConfig("clips", str(made), columns={"video": "path", "joystick": "joystick"})


@pytest.mark.slow
def test_a_training_step_reaches_its_weights(
    run_config: TrainConfig, stick: WorldModel, tmp_path: Path
) -> None:
    made = record(tmp_path, "lerobot")
    stage = changed(
        run_config,
        steps=1,
        warmup_steps=0,
        tasks={"rounds": 1.0},
        train={"adapters": TrainedConfig()},
        self_rollout=(0.0, 0.0),
        ema_decay=0.0,
    )
    model = replace(config_of(stick), world=None)
    folder = stick.save_pretrained(tmp_path / "before", dtype=torch.float32)
    config = replace(
        stage,
        model=model,
        data=DataConfig({"mine": source_of(made, "lerobot")}),
        init_from={"action": str(folder)},
        sample_every=0,
        run_dir=str(tmp_path / "run"),
    )
    trained = WorldModel.from_pretrained(finetune.train(config)).action.state_dict()
    before = stick.action.state_dict()
    assert {name for name in before if name.startswith("joystick.")} <= trained.keys()
    assert not torch.equal(before["joystick.0.weight"], trained["joystick.0.weight"])


def test_names_that_are_taken_are_refused() -> None:
    for name in ("chunk", "video", "two words", "_mine"):
        kind = Joystick()
        kind.name = name
        with pytest.raises(ConfigError, match=re.escape(repr(name))):
            register_action_kind(kind)


def test_the_code_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "actions.md"
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, page.name, "exec"), names)
    assert capsys.readouterr().out == "dial 0.5\n"
    with pytest.raises(InputError, match="use -1 to 1"):
        Action.of({"dial": [2]}).check(names["takes"])
    assert understand("dial 7", names["takes"]) == Action(dial=(1.0,))


SERVED = """
import io, json, sys
from pathlib import Path
import numpy as np
from local_client import LocalClient
from worldmodel.actions import action_kinds
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

pushed = {"joystick": {"axes": [0.5, -1.0], "button": True}}
model = WorldModel.from_pretrained(sys.argv[1])
session = model.session(seed=3)
session.reset(text="a red ball")
expected = session.step(pushed).frames.astype(int)
found = {"kinds": [kind.name for kind in action_kinds()]}
app = create_app(WorldService(model), ServerConfig(model_name="stick", data_dir=Path(sys.argv[2])))
with LocalClient(app) as client:
    found["schema"] = client.get("/openapi.json").json()["components"]["schemas"]["JoystickBody"]
    world = client.post("/v1/worlds", json={"text": "a red ball", "seed": 3}).json()
    found["offered"] = world["action_schema"]
    address = f"/v1/worlds/{world['id']}/step"
    for bad in ({"axes": [0]}, {"axes": [0, 2]}, {"axes": [0, "1"]}, {"axes": [0, 0], "lever": 1}):
        answer = client.post(address, json={"step_id": 1, "action": {"joystick": bad}})
        found.setdefault("refused", []).append([answer.status_code, answer.json()["error"]["message"]])
    answer = client.post(address, json={"step_id": 1, "action": pushed}, params={"format": "npy"})
    found["http"] = int(np.abs(np.load(io.BytesIO(answer.content)).astype(int) - expected).max())
    with client.websocket_connect(ROUTE) as socket:
        def until(*types):
            while (event := socket.receive_json())["type"] not in types:
                for _ in range(event.get("num_messages", 0)):
                    socket.receive_bytes()
            return event
        found["hello"] = until("session.created")["action"]["kinds"]
        start = {"type": "session.start", "text": "a red ball", "pace": "on_action", "seed": 3}
        socket.send_json(start)
        for _ in range(until("video.chunk_metadata")["num_messages"]):
            socket.receive_bytes()
        socket.send_json({"type": "session.interaction", "interaction": {"event": {"action": pushed}}})
        found["websocket"] = until("video.chunk_metadata", "error")["action"]["joystick"]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_server_finds_it_by_its_entry_point(stick: WorldModel, tmp_path: Path) -> None:
    """As the package of a third party would bring it, which is installed and nothing else."""
    package = tmp_path / "packages" / "joystick_kind-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: joystick-kind\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[worldmodel.actions]\njoystick = joystick:Joystick\n")
    folder = stick.save_pretrained(tmp_path / "model", dtype=torch.float32)
    shared = Path(__file__).parents[1] / "shared"
    paths = [str(package.parent), str(shared), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-c", SERVED, str(folder), str(tmp_path / "data")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["kinds"][-1] == "joystick"
    assert found["schema"]["required"] == ["axes"] and not found["schema"]["additionalProperties"]
    assert found["schema"]["properties"]["axes"]["maxItems"] == 2
    assert found["offered"]["kinds"]["joystick"] is found["hello"]["joystick"] is True
    assert found["offered"]["widgets"]["joystick"]["type"] == "buttons"
    assert [status for status, _ in found["refused"]] == [400] * 4
    assert "use axes of -1 to 1" in found["refused"][1][1]
    assert "action.joystick.axes" in found["refused"][2][1]
    assert found["http"] <= 1
    assert found["websocket"] == PUSHED["joystick"]
