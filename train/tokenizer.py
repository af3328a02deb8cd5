"""The tokenizer of a backbone that starts from nothing."""

from itertools import islice

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from worldmodel import hub
from worldmodel.config import TrainConfig
from worldmodel.worlds import shapes

NUM_DOCUMENTS = 8000
SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}


def build_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase | None:
    """Learn a byte-level BPE on the world's own text, or take that of the model to start from.

    None where the backbone brings a tokenizer.
    """
    if config.init_from:
        return AutoTokenizer.from_pretrained(
            hub.resolve(config.init_from) / "backbone", trust_remote_code=False
        )
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
    documents = islice(shapes.documents(np.random.default_rng(config.seed)), NUM_DOCUMENTS)
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
