"""Video generators: our diffusion transformer and generators of diffusers."""
