"""The training log: segments of packed clips, how they are read and exported, and figures about a flow."""
