"""The work on clips: what is left to do, each stage's part of it, and the run that coordinates it."""
