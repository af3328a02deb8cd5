"""Weights of larger worlds, which the package `worldmodel` finds by name."""
