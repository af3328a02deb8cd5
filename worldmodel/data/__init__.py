"""From files to tensors: media, sources, transforms and the loader."""
