"""The folder of a training run: its lock, logs, summary and publication."""
