"""Flow matching: schedules, loss and solvers, as pure functions."""
