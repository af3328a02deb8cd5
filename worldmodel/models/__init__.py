"""The world model and its components."""
