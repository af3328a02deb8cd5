"""Any2Any world models: train, run and serve worlds that a user steers round after round.

session = WorldModel.from_pretrained("shapes-tiny").session(seed=0)
session.reset("first_frame.png")
frames = session.step("the red ball moves left").frames
session.save("out.mp4")

The names in `__all__` are the public interface; every other module and name may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldmodel.actions import Action
    from worldmodel.config import TrainConfig, WorldModelConfig
    from worldmodel.config.files import load as load_config
    from worldmodel.env import RecordedStarts, WorldEnv, WorldVectorEnv
    from worldmodel.env.sb3 import StableBaselinesEnv
    from worldmodel.episodes import Outcome, StepResult
    from worldmodel.errors import (
        ConfigError,
        DatabaseError,
        InputError,
        ModelError,
        OutputError,
        WorldModelError,
    )
    from worldmodel.eval.judge import Verdict
    from worldmodel.flow.stages.base import stage
    from worldmodel.models.world_model import WorldModel
    from worldmodel.planning import (
        Box,
        Choices,
        GoalImage,
        ModelSimulator,
        PlanSettings,
        Reached,
        Return,
        Simulator,
        plan,
    )
    from worldmodel.recording import record_environment
    from worldmodel.recording.settings import EnvironmentSettings
    from worldmodel.rollout.session import Session, Snapshot
    from worldmodel.serving.client import AsyncClient, Client
    from worldmodel.worlds import World, get_world, register_world, start_images

__version__ = "0.1.0"

_HOMES = {
    "Action": "worldmodel.actions:Action",
    "AsyncClient": "worldmodel.serving.client:AsyncClient",
    "Box": "worldmodel.planning:Box",
    "Choices": "worldmodel.planning:Choices",
    "Client": "worldmodel.serving.client:Client",
    "ConfigError": "worldmodel.errors:ConfigError",
    "DatabaseError": "worldmodel.errors:DatabaseError",
    "EnvironmentSettings": "worldmodel.recording.settings:EnvironmentSettings",
    "GoalImage": "worldmodel.planning:GoalImage",
    "InputError": "worldmodel.errors:InputError",
    "ModelError": "worldmodel.errors:ModelError",
    "ModelSimulator": "worldmodel.planning:ModelSimulator",
    "Outcome": "worldmodel.episodes:Outcome",
    "OutputError": "worldmodel.errors:OutputError",
    "PlanSettings": "worldmodel.planning:PlanSettings",
    "Reached": "worldmodel.planning:Reached",
    "RecordedStarts": "worldmodel.env:RecordedStarts",
    "Return": "worldmodel.planning:Return",
    "Session": "worldmodel.rollout.session:Session",
    "Simulator": "worldmodel.planning:Simulator",
    "Snapshot": "worldmodel.rollout.session:Snapshot",
    "StableBaselinesEnv": "worldmodel.env.sb3:StableBaselinesEnv",
    "StepResult": "worldmodel.episodes:StepResult",
    "TrainConfig": "worldmodel.config:TrainConfig",
    "Verdict": "worldmodel.eval.judge:Verdict",
    "World": "worldmodel.worlds:World",
    "WorldEnv": "worldmodel.env:WorldEnv",
    "WorldModel": "worldmodel.models.world_model:WorldModel",
    "WorldModelConfig": "worldmodel.config:WorldModelConfig",
    "WorldModelError": "worldmodel.errors:WorldModelError",
    "WorldVectorEnv": "worldmodel.env:WorldVectorEnv",
    "get_world": "worldmodel.worlds:get_world",
    "load_config": "worldmodel.config.files:load",
    "plan": "worldmodel.planning:plan",
    "record_environment": "worldmodel.recording:record_environment",
    "register_world": "worldmodel.worlds:register_world",
    "stage": "worldmodel.flow.stages.base:stage",
    "start_images": "worldmodel.worlds:start_images",
}
"""Where each public name is defined, as `module:name`."""

__all__ = [
    "Action",
    "AsyncClient",
    "Box",
    "Choices",
    "Client",
    "ConfigError",
    "DatabaseError",
    "EnvironmentSettings",
    "GoalImage",
    "InputError",
    "ModelError",
    "ModelSimulator",
    "Outcome",
    "OutputError",
    "PlanSettings",
    "Reached",
    "RecordedStarts",
    "Return",
    "Session",
    "Simulator",
    "Snapshot",
    "StableBaselinesEnv",
    "StepResult",
    "TrainConfig",
    "Verdict",
    "World",
    "WorldEnv",
    "WorldModel",
    "WorldModelConfig",
    "WorldModelError",
    "WorldVectorEnv",
    "__version__",
    "get_world",
    "load_config",
    "plan",
    "record_environment",
    "register_world",
    "stage",
    "start_images",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `import worldmodel` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'worldmodel' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute)
