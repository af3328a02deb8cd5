"""`worldmodel export`: hands over to the training floor, which the library never imports by itself."""

import importlib


def main(argv: list[str]) -> int:
    """Turn a checkpoint of a training run into a model folder, or what LoRA learned into adapters."""
    return importlib.import_module("worldmodel.train.checkpoint.export").main(argv)
