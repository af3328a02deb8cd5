"""Videos as jobs, and their files."""
