"""The tutorial on a world of one's own runs as written, with few episodes and steps."""

import re
import shlex
from pathlib import Path

import pytest

from worldmodel.cli import main
from worldmodel.models.world_model import WorldModel

pytest.importorskip("minigrid")
PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "own-world.md"
SMALL = {
    "--episodes": "8",
    "--max-steps": "8",
    "--workers": "0",
    "--num-samples": "2",
    "--rounds": "2",
    "--inverse-dynamics-steps": "2",
    "--horizon": "2",
    "--candidates": "4",
    "--plans": "1",
}


def commands() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^\$ worldmodel (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def small(words: list[str]) -> list[str]:
    return [SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)]


@pytest.mark.slow
def test_commands_of_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verbs = []
    for words in map(small, commands()):
        if words[0] in ("demo", "serve"):
            continue
        if words[0] == "new":
            words += ["--twins", "10", "--branches", "10"]
        if words[0] == "train":
            words += ["precision=fp32", "checkpoint_every=2", "validation.batches=1", "validation.every=2"]
            words += [
                f"stages.{name}.{key}=2"
                for name in ("codec", "state", "rollout")
                for key in ("steps", "batch_size")
            ]
        assert main(words) == 0, capsys.readouterr().err
        verbs.append(words[0])
    assert verbs == ["record", "data", "data", "new", "train", "eval", "plan"]
    model = WorldModel.from_pretrained(tmp_path / "runs" / "doorkey" / "model")
    assert model.state is not None and model.state.outcome is not None
    assert (model.config.pace, model.config.chunk_frames) == ("on_action", 1)
    assert model.start_images
    assert "random actions" in capsys.readouterr().out
