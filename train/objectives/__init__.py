"""Training objectives: one small class per stage objective."""
