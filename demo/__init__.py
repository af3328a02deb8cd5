"""Demo: the first steps a new user sees, and the page to play on."""
