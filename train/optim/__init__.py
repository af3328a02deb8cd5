"""Optimizers, learning-rate schedule and averages of weights."""
