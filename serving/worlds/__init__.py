"""Live worlds: the service that plays them and the registry of their owners."""
