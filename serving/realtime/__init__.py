"""WebSocket sessions: events, pacing, connections."""
