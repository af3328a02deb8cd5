"""Revisions of the schema, each of which changes the one before it."""
