"""Any2Any world models: train, run and serve worlds that a user steers round after round.

session = WorldModel.from_pretrained("shapes-tiny").session(seed=0)
session.reset("first_frame.png")
frames = session.step("the red ball moves left").frames
session.save("out.mp4")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldmodel.config import load as load_config
    from worldmodel.errors import WorldModelError
    from worldmodel.models.world_model import WorldModel
    from worldmodel.rollout import Session
    from worldmodel.types import Action, StepResult

__version__ = "0.1.0"

_HOMES = {
    "Action": ("worldmodel.types", "Action"),
    "Session": ("worldmodel.rollout", "Session"),
    "StepResult": ("worldmodel.types", "StepResult"),
    "WorldModel": ("worldmodel.models.world_model", "WorldModel"),
    "WorldModelError": ("worldmodel.errors", "WorldModelError"),
    "load_config": ("worldmodel.config", "load"),
}

__all__ = ["Action", "Session", "StepResult", "WorldModel", "WorldModelError", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `import worldmodel` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'worldmodel' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
