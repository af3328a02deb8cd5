"""Training; imported by neither the library nor the server."""
