"""Atomic writes of files and folders."""

from worldmodel.io.atomic import (
    TEMPORARY_PREFIX,
    atomic_file,
    atomic_folder,
    fsync,
    move,
    staged_files,
)

__all__ = ["TEMPORARY_PREFIX", "atomic_file", "atomic_folder", "fsync", "move", "staged_files"]
