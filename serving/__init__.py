"""Serving: an HTTP and WebSocket front for live worlds, over the library."""
