"""Captions of clips by a model behind an OpenAI-compatible chat endpoint."""
