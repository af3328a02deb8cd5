"""Image and video files, contact sheets, and conversion between frames and tensors."""
