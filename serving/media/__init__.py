"""Decoding of uploads in restricted child processes, and encoding of responses."""
