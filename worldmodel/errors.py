"""Errors caused by a user's input; each message is one sentence that names the bad value and the remedy.

WorldModelError(ValueError)
├── ConfigError     a key or value in a configuration
├── DatabaseError   a database that does not answer, or refuses
├── InputError      an image, video, text or action that cannot be used
├── ModelError      a model name or folder that cannot be loaded
└── OutputError     a file or folder that cannot be written
"""


class WorldModelError(ValueError):
    """Base class of user errors; the command line prints the message and exits with code 2."""


class ConfigError(WorldModelError):
    """A configuration key or value is wrong."""


class DatabaseError(WorldModelError):
    """A database does not answer, or refuses."""


class InputError(WorldModelError):
    """An observation, action or prompt cannot be used."""


class ModelError(WorldModelError):
    """A model name or folder cannot be loaded."""


class OutputError(WorldModelError):
    """A file or folder cannot be written."""
