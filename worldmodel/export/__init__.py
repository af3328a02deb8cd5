"""Models in the form of other runtimes."""
