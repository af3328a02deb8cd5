"""Worlds whose every frame comes with the truth: what is there, where, and what was done."""
