"""Loading of weights in the formats of transformers and diffusers, immediate or deferred."""
