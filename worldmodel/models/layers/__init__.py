"""Layers that several parts share: attention, norms, mixing on latent cells, the resampler."""
