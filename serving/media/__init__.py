"""Decoding of uploads in restricted child processes, and MP4 of live videos."""
