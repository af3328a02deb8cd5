"""Reading weights from files of transformers and diffusers, at once or deferred."""
