"""Training data: sources of episodes, their order, and the loader."""
