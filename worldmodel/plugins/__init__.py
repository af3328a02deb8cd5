"""Plug-ins that come with the package: found by their entry points, and imported by nothing else."""
