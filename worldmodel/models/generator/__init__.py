"""Video generators: our diffusion transformer and those of diffusers."""
