"""Live worlds over a WebSocket: events, pacing, connections."""
