"""Measurements and checks of a training run that do not change its results."""
