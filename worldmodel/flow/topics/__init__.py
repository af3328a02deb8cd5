"""Topics: queues of clip ids between stages."""
