"""Video jobs and their files."""
