"""Actions of every kind, for a model that takes all of them."""

from typing import Any

from worldmodel.config import ActionConfig

ALL = ActionConfig(
    text={"max_tokens": 64},
    keys=("w", "a", "s", "d"),
    vector={"names": ("reach", "grip"), "low": (-2.0, 0.0), "high": (2.0, 1.0)},
    mouse=True,
    camera=True,
)
FORWARD: dict[str, Any] = {"mode": "velocity", "data": {"translation": [0, 0, 1]}}
FULL: dict[str, Any] = {
    "text": "go on",
    "keys": ["w"],
    "mouse": [0.5, -1],
    "vector": [0.1, 1],
    "camera": FORWARD,
}
