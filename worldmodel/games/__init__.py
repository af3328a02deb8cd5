"""Third-party games: environments, policies that record them, and judges of their frames."""
