"""The catalog: which clips there are, and what each stage made of them."""
