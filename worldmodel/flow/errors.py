"""Errors of the data flow."""

from worldmodel.errors import WorldModelError


class FlowError(WorldModelError):
    """A flow cannot run or go on: its catalog, topics, buffer or workers."""


class StageError(FlowError):
    """A stage does not do what its declaration says, or does not respond."""
