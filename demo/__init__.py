"""Demos: a tour of the Python API, and web pages to steer a world."""
