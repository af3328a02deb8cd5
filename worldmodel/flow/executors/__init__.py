"""Executors: what runs the stages of a flow."""
