"""The evaluation suite of the shapes world."""
