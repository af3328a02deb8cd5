"""Decoding of uploads in child processes, and encoding of responses."""
