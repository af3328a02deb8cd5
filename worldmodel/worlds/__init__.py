"""Worlds with known rules, which generate training data, judge frames and suggest actions."""

from worldmodel.worlds.base import World
from worldmodel.worlds.registry import get_world, register_world, start_images, suite_of, world_names

__all__ = ["World", "get_world", "register_world", "start_images", "suite_of", "world_names"]
