"""Engines that run the backbone, request batching and the denoising loop."""
