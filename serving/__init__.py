"""An HTTP and WebSocket server for live worlds, videos and text, and its clients."""
