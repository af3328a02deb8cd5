"""The tokenizer of a backbone from scratch learns the user's texts, once in a run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from clip_tables import MODEL, write_table
from runs import changed

from worldmodel import media
from worldmodel.config import ActionConfig, BackboneConfig, DataConfig, SourceConfig, StageConfig, TrainConfig
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune
from worldmodel.train.checkpoint import export
from worldmodel.train.tokenizer import build_tokenizer, documents

SAID = "den Becher vorsichtig auf das Regal stellen"
ASKED, ANSWERED = "Wo steht der Becher?", "auf dem obersten Regal"
TAKES_TEXT = dataclasses.replace(
    MODEL,
    action=ActionConfig(),
    backbone=BackboneConfig(vocab_size=100_000),  # far more than the texts fill
)
COLUMNS = {"video": "video", "text": "text", "question": "question", "answer": "answer"}


def clips(folder: Path, said: str = SAID) -> SourceConfig:
    """A table of clips with texts, questions and answers."""
    folder.mkdir(exist_ok=True)
    media.write_video(np.zeros((17, 32, 32, 3), np.uint8), folder / "clip.mp4", 8, scale=1)
    row = {"video": "clip.mp4", "text": said, "question": ASKED, "answer": ANSWERED}
    return SourceConfig("clips", str(write_table(folder, [row] * 3)), columns=COLUMNS)


def run_on(*sources: SourceConfig) -> TrainConfig:
    """A run that draws from sources."""
    return TrainConfig(
        model=TAKES_TEXT,
        data=DataConfig({f"source{index}": source for index, source in enumerate(sources)}),
        stages={"state": StageConfig(tasks={"rounds": 1.0})},
    )


def test_texts_of_the_user_are_learned(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Ein langer Satz über Gläser."}) + "\n")
    documents_alone = SourceConfig("text", str(tmp_path / "texts.jsonl"))
    tokenizer = build_tokenizer(run_on(clips(tmp_path / "clips"), documents_alone))
    again = build_tokenizer(run_on(clips(tmp_path / "clips"), documents_alone))
    assert tokenizer is not None and again is not None
    assert tokenizer.get_vocab() == again.get_vocab()
    for said in (SAID, ASKED, ANSWERED, "Ein langer Satz über Gläser."):
        ids = tokenizer.encode(said)
        assert len(ids) < len(said.encode()) / 3
        assert tokenizer.decode(ids).strip() == said
    other = "unknown words round-trip, too: ☃"
    assert tokenizer.decode(tokenizer.encode(other)).strip() == other
    assert 258 < len(tokenizer) < 1000


def test_held_out_texts_and_those_of_sources_that_are_not_drawn_from_are_not_read(tmp_path: Path) -> None:
    held = dataclasses.replace(clips(tmp_path / "held", "geheim"), weight=0.0)
    config = run_on(clips(tmp_path / "clips"), held)
    found = set(documents(config, 90))
    assert found == {SAID, ASKED, ANSWERED}


def test_own_texts_and_a_world_share_the_corpus(tmp_path: Path) -> None:
    config = run_on(clips(tmp_path / "clips"), SourceConfig("shapes"))
    found = list(documents(config, 10))
    assert len(found) == 10
    assert sum(text in (SAID, ASKED, ANSWERED) for text in found) == 5
    silent = run_on(
        dataclasses.replace(clips(tmp_path / "clips"), columns={"video": "video"}), SourceConfig("shapes")
    )
    alone = run_on(SourceConfig("shapes"))
    assert list(documents(silent, 10)) == list(documents(alone, 10))  # a source without texts takes no share


def test_a_resumed_run_keeps_its_tokenizer_when_the_data_changes(
    run_config: TrainConfig, tmp_path: Path
) -> None:
    source = clips(tmp_path / "clips")
    model = dataclasses.replace(run_config.model, codec=MODEL.codec, chunk_frames=8, fps=8, world=None)
    config = dataclasses.replace(
        changed(run_config, steps=2, batch_size=2, tasks={"rounds": 1.0}),
        model=model,
        data=DataConfig({"mine": source}),
        tokenizer="",
        sample_every=0,
    )
    finetune.train(config, stop=lambda: True)
    stored = Path(config.run_dir) / "tokenizer" / "tokenizer.json"
    before = stored.read_bytes()
    clips(tmp_path / "clips", "etwas ganz anderes")
    folder = finetune.train(config)
    assert stored.read_bytes() == before
    tokenizer = WorldModel.from_pretrained(str(folder)).backbone.tokenizer
    assert len(tokenizer.encode(SAID)) < len(SAID) / 3
    checkpoint = next((Path(config.run_dir) / "checkpoints").glob("*-2"))
    exported = WorldModel.from_pretrained(str(export.export(checkpoint, tmp_path / "exported")))
    assert exported.backbone.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert json.loads((Path(config.run_dir) / "config.json").read_text())["tokenizer"] == ""


def test_a_tokenizer_can_be_given(tokenizer_folder: str) -> None:
    config = TrainConfig(tokenizer=tokenizer_folder)
    tokenizer = build_tokenizer(config)
    assert tokenizer is not None and len(tokenizer) == 320
    with pytest.raises(ConfigError, match="nowhere"):
        build_tokenizer(dataclasses.replace(config, tokenizer="nowhere"))
