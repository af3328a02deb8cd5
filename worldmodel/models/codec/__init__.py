"""Video codecs: our autoencoder and codecs of diffusers."""
