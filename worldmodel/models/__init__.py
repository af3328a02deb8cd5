"""The parts of a world model, and the model that reads like the figure."""
