"""Worlds whose rules are known: they make training data, judge a model's frames and suggest actions."""

from worldmodel.worlds.base import World
from worldmodel.worlds.registry import get_world, register_world, world_names

__all__ = ["World", "get_world", "register_world", "world_names"]
