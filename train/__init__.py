"""Training: each stage reads top to bottom; nothing here is imported by the library or by serving."""
