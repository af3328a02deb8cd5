"""The tokenizer of a backbone that is trained from scratch."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from worldmodel.config import TrainConfig
from worldmodel.data.loader import trained_sources
from worldmodel.data.sources import open_source
from worldmodel.errors import ConfigError
from worldmodel.io import atomic_folder
from worldmodel.models.loading import model_folder
from worldmodel.models.loading.pretrained import LOAD_ERRORS
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.components import settings_of
from worldmodel.worlds import get_world, world_names

FOLDER = "tokenizer"
"""Name of the folder of the tokenizer in a run's folder."""
NUM_DOCUMENTS = 8000
NUM_ROWS = 2000
"""Most rows of a source whose texts are read."""
NUM_STREAMED = 200
"""The same of a source that is read front to back, whose rows come with their videos."""
NUM_PROBED = 100
"""Rows without a text after which a source is taken to have none."""
MAX_CHARACTERS = 2000
"""Length to which texts are cut."""
SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}


def with_tokenizer(config: TrainConfig, mesh: Mesh, resumed: bool) -> TrainConfig:
    """Return a run whose `tokenizer` is stored, so that it stays the same when the data changes.

    The first process learns it, unless the run is resumed and has one; every process must call this.

    Raises:
        WorldModelError: a source cannot be read, or the folder cannot be written.
    """
    if config.tokenizer or config.model.backbone.pretrained or settings_of("backbone", config.init_sources):
        return config
    run = Path(config.run_dir)
    error = None
    if mesh.first and not (resumed and (run / FOLDER).is_dir()):
        try:
            tokenizer = build_tokenizer(config)
            assert tokenizer is not None, "no other model brings one"
            with atomic_folder(run / FOLDER) as temporary:
                tokenizer.save_pretrained(temporary)
        except Exception as failed:  # the others would wait for this process
            error = failed
    if error := mesh.all_gather(error)[0]:  # and nobody reads before it is complete
        raise error
    return with_stored(config, run)


def with_stored(config: TrainConfig, run: Path) -> TrainConfig:
    """Return the config of a run with the tokenizer in its folder, if it has learned one."""
    folder = run / FOLDER
    return replace(config, tokenizer=str(folder)) if folder.is_dir() and not config.tokenizer else config


def build_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer of the config or of the model to start from, or learn one from the config's data.

    It is a byte-level BPE. Where the data has little text, its vocabulary is smaller than
    `backbone.vocab_size`; where it has none, the 256 bytes alone. None where the backbone brings a tokenizer.

    Raises:
        ConfigError: `tokenizer` is not a tokenizer's folder, or a source cannot be read.
    """
    if name := settings_of("backbone", config.init_sources):
        return _read(model_folder.backbone_folder(model_folder.resolve(name)))
    if config.model.backbone.pretrained:
        return None
    if config.tokenizer:
        return _read(Path(config.tokenizer).expanduser())
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
    """Yield `count` texts, in equal parts of the worlds of the config and of its trained sources with texts.

    Raises:
        ConfigError: a source cannot be read.
    """
    kinds = (config.model.world, *(source.kind for source in config.data.sources.values()))
    worlds = dict.fromkeys(kind for kind in kinds if kind in world_names())
    own = [
        name
        for name in trained_sources(config.data, config.stages.values())
        if config.data.sources[name].kind not in worlds
    ]
    told = [texts for name in own if (texts := source_texts(config, name, count))]
    share = count // max(len(worlds) + len(told), 1)
    for name in worlds:
        yield from islice(get_world(name).documents(np.random.default_rng(config.seed)), share)
    for texts in told:
        yield from islice(cycle(texts), share)


def source_texts(config: TrainConfig, name: str, count: int) -> list[str]:
    """Return up to `count` texts of random rows of a source; of one that is read in streams, its first rows.

    Raises:
        ConfigError: the source cannot be read.
    """
    rng = np.random.default_rng(config.seed)
    source = open_source(name, config.data, config.model)
    texts: list[str] = []
    try:
        if source.streams or source.size is None:
            rows = list(range(NUM_ROWS if source.tasks == ("document",) else NUM_STREAMED))
        else:  # sorted, because rows of one file are read together
            rows = sorted(rng.choice(source.size, min(NUM_ROWS, source.size), replace=False).tolist())
        for number, row in enumerate(rows):
            if number == NUM_PROBED and not texts:
                break
            texts += [text[:MAX_CHARACTERS] for text in source.at(row).texts]
    finally:
        source.close()
    return [texts[index] for index in rng.permutation(len(texts))[:count]]


def _read(folder: Path) -> PreTrainedTokenizerBase:
    try:
        if folder.is_dir():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS:
        pass  # what transformers says of a folder without one is a page of class names
    raise ConfigError(f"There is no tokenizer in {str(folder)!r}; check the key `tokenizer`.")
