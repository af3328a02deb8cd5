"""Rollouts: one round, batch first, and the session that plays it."""

from worldmodel.rollout.session import Session, Snapshot

__all__ = ["Session", "Snapshot"]
