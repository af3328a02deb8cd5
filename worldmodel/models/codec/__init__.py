"""Video codecs: our autoencoder and those of diffusers."""
