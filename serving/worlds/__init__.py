"""Live worlds: the service that plays rounds, and the registry of owners and limits."""
