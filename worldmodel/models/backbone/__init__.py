"""The backbone: a causal language model of transformers, and the cache of its prefixes."""
