"""Rollouts: one round, batch first, and the session that plays it."""

from worldmodel.rollout.futures import Future
from worldmodel.rollout.recording import Recording
from worldmodel.rollout.round import Engine, LocalEngine, SamplingParams, play_round, start_worlds
from worldmodel.rollout.session import Session, Snapshot
from worldmodel.rollout.state import WorldState

__all__ = [
    "Engine",
    "Future",
    "LocalEngine",
    "Recording",
    "SamplingParams",
    "Session",
    "Snapshot",
    "WorldState",
    "play_round",
    "start_worlds",
]
