"""Memory of a training step: its estimate before a run, and advice when it is exceeded."""
