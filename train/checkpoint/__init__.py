"""Checkpoints: writing, reading, resharding and export."""
