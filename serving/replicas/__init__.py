"""Servers that share a database: their tables, and the lease by which each holds worlds and videos."""
