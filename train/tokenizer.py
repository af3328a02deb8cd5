"""The tokenizer of a backbone that is trained from scratch."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from worldmodel.config import TrainConfig
from worldmodel.models.loading import model_folder
from worldmodel.train.components import settings_of
from worldmodel.worlds import get_world, world_names

NUM_DOCUMENTS = 8000
SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}


def build_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase | None:
    """Learn a byte-level BPE from the worlds of the config, or take that of the model to start from.

    Where no world has documents, the vocabulary is the 256 bytes alone. None where the backbone brings a
    tokenizer.
    """
    if name := settings_of("backbone", config.init_sources):
        folder = model_folder.backbone_folder(model_folder.resolve(name))
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if config.model.backbone.pretrained:
        return None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.model.backbone.vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(config, NUM_DOCUMENTS), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def documents(config: TrainConfig, count: int) -> Iterator[str]:
    """Yield `count` texts, divided among the model's world and the worlds among the sources."""
    kinds = (config.model.world, *(source.kind for source in config.data.sources.values()))
    names = dict.fromkeys(kind for kind in kinds if kind in world_names())
    for name in names:
        yield from islice(get_world(name).documents(np.random.default_rng(config.seed)), count // len(names))
