"""Every preset by the commands of its header, in small: recorded, trained, exported, copied, played.

Each stage is stopped once after its first step and resumed. Where a header trains pretrained parts, there are
tiny ones of the same classes with random weights; environments, where they are installed, are the real ones.
"""

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from architectures import DECODER, QWEN_VL, SIGLIP
from doc_pages import ROOT
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
)

from worldmodel import media
from worldmodel.cli import main
from worldmodel.models.loading.location import resolve
from worldmodel.train import finetune
from worldmodel.train.checkpoint import checkpointer
from worldmodel.train.run import settings

SHORTER = {"--episodes": "8", "--max-steps": "12", "--workers": "0"}
"""Values of `worldmodel record` in place of the header's."""
PACKAGES = {"crafter": "crafter", "doom_maze": "vizdoom", "doorkey": "minigrid"}
PACKAGES |= {"babyai": "minigrid", "pusht": "gym_pusht"}
LARGE = ("pan", "pandora")
CONFIGS = ("babyai", "crafter", "dit_pretrain", "doom_maze", "doorkey", "own_clips", "pusht", *LARGE)
BASE = ["model.backbone.pretrained=base", "model.backbone.num_layers=2"]
CLIP_S = 4
"""Length of the clips."""


def header(name: str) -> list[list[str]]:
    """Return the words of the commands of `worldmodel` and `torchrun` in a config's header."""
    lines = itertools.takewhile(
        lambda line: line.startswith("#"), (ROOT / "configs" / f"{name}.yaml").read_text().splitlines()
    )
    text = "\n".join(line.removeprefix("#").strip() for line in lines).replace("\\\n", " ")
    for variable, values, body in re.findall(r"for (\w+) in ([^;]*); do\n(.*?)\ndone", text, re.DOTALL):
        repeated = "\n".join(body.replace(f"${variable}", value) for value in values.split())
        text = text.replace(body, repeated)
    found = [line for line in text.splitlines() if line.startswith(("worldmodel ", "torchrun "))]
    return [shlex.split(re.split(r"\s{2,}[(#]", line)[0], comments=True) for line in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_by_its_commands(
    name: str, workplace: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    if package := PACKAGES.get(name):
        pytest.importorskip(package, reason=f"{package} is not installed: openworldmodel[dev]")
    small = workplace(name)
    trained = False
    for program, *words in header(name):
        if words[0] in ("record", "data"):
            words = [SHORTER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
            assert main(words) == 0, capsys.readouterr().err
        elif words[0] == "train" or "worldmodel.train.finetune" in words:
            given = (
                words[words.index("worldmodel.train.finetune") + 1 :] if program == "torchrun" else words[1:]
            )
            assert given[0] == name
            train(given, small)
            trained = True
    assert trained, "the header says how to train it"
    play_elsewhere(Path(settings.load(name, small).run_dir), capsys)


@pytest.mark.parametrize("name", LARGE)
def test_headers_name_the_columns_and_the_commands(name: str) -> None:
    config = settings.load(name)
    assert all(each.preset or "video" in each.columns for each in config.data.sources.values())
    assert [words for words in header(name) if "worldmodel.train.finetune" in words]


def shortened(given: Sequence[str], small: Sequence[str]) -> list[str]:
    """Return the overrides with which every stage has two steps of two episodes."""
    config = settings.load(given[0], [*given[1:], *small])
    steps = [f"stages.{stage}.{key}=2" for stage in config.stages for key in ("steps", "batch_size")]
    rounds = [f"stages.{stage}.rounds=3" for stage, each in config.stages.items() if each.rounds > 3]
    validation = ["validation.every=2", "validation.batches=1"] if config.validation.source else []
    rest = ["checkpoint_every=1", "precision=fp32", "sample_every=0", "data.num_workers=0", "log_every=1"]
    return [*small, *steps, *rounds, *validation, *rest]


def train(given: Sequence[str], small: Sequence[str]) -> None:
    """Train all stages of a config; each is stopped after its first step and resumed."""
    config = settings.load(given[0], [*given[1:], *shortened(given, small)])
    stopped, result = 0, Path()
    for asked in range(len(config.stages) + 1):
        # Asked after every step and at the end of a stage: the second step of one and its end come first.
        calls = itertools.count(1)
        result = finetune.train(config, stop=lambda calls=calls, last=3 if asked else 1: next(calls) >= last)
        if result != Path(config.run_dir):
            break
        stopped += 1
    assert result == Path(config.run_dir) / "model"
    assert stopped == len(config.stages)


def play_elsewhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export a run, copy both models to where nothing else is, and play three rounds of each."""
    newest = checkpointer.latest(run)
    assert newest is not None
    assert main(["export", str(newest), "exported"]) == 0, capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        here = Path.cwd()
        for number, folder in enumerate((run / "model", Path("exported"))):
            there = here / f"there-{number}"
            there.mkdir()
            model = shutil.copytree(folder, there / "model")
            patch.chdir(there)
            patch.setenv("XDG_CACHE_HOME", str(there / "cache"))
            away = []
            for part in ("base", "models"):  # what it was trained with is not here
                if (here / part).is_dir():
                    (here / part).rename(here / f"{part}-away")
                    away.append(part)
            try:
                config = json.loads((model / "config.json").read_text())["model"]
                size = config["codec"]["image_size"]
                height, width = size if isinstance(size, list) else (size, size)
                pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save("start.png")
                base = model / "backbone" / "base.json"
                options = []
                if base.is_file():
                    assert main(["rollout", "start.png", "wait", "--model", "model"]) == 2
                    assert "--base" in capsys.readouterr().err
                    known = Path(json.loads(base.read_text())["folder"]).relative_to(here)
                    options = ["--base", str(here / f"{known.parts[0]}-away" / Path(*known.parts[1:]))]
                words = ["rollout", "start.png", "wait", "--rounds", "3", "--model", "model", "--out", "out"]
                steps = ["--num-inference-steps", "2"] if config["generator"] else []
                assert main([*words, *steps, *options]) == 0, capsys.readouterr().err
                assert (there / "out" / "rollout.mp4").stat().st_size
            finally:
                for part in away:
                    (here / f"{part}-away").rename(here / part)
                patch.chdir(here)


@pytest.fixture
def workplace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny: SimpleNamespace,
    tokenizer: PreTrainedTokenizerBase,
    pipeline: Callable[..., tuple[Path, Any]],
) -> Callable[[str], list[str]]:
    """Make a folder to run a preset in, with what it needs beside its data; returns overrides of sizes."""

    def make(name: str) -> list[str]:
        place = tmp_path / "place"
        place.mkdir()
        monkeypatch.chdir(place)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        if settings.load(name).model.backbone.pretrained == "smollm2-135m-instruct":
            shutil.copytree(resolve("shapes-tiny") / "backbone", "base")
        if name == "dit_pretrain":
            return BASE
        if name == "pan":
            return pan(tokenizer, pipeline)
        if name == "pandora":
            return pandora(tokenizer, tiny)
        return []

    return make


def write_clips(folder: Path, fps: int) -> list[str]:
    """Write four clips of noise that moves; returns their names."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(4):
        start = rng.integers(0, 255, (32, 48, 3), dtype=np.uint8)
        frames = np.stack([np.roll(start, shift, axis=1) for shift in range(CLIP_S * fps)])
        media.write_video(frames, folder / f"{number}.mp4", fps)
    return [str(number) for number in range(4)]


def pan(tokenizer: PreTrainedTokenizerBase, pipeline: Callable[..., tuple[Path, Any]]) -> list[str]:
    """Write the parts and the data of `pan`."""
    folder, _ = pipeline("wan")
    Path("models").mkdir()
    shutil.move(folder, "models/Wan2.1-T2V-14B-Diffusers")
    text = {name: value for name, value in DECODER.items() if name not in ("model_type", "head_dim")}
    text |= {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "mrope_section": [2, 2, 2]}}
    tower = {name: value for name, value in QWEN_VL.items() if name != "model_type"}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=tower, tie_word_embeddings=True)
    )
    model.save_pretrained("models/Qwen2.5-VL-7B-Instruct")
    tokenizer.save_pretrained("models/Qwen2.5-VL-7B-Instruct")
    names = write_clips(Path("clips"), 16)
    rows = [{"path": f"{name}.mp4", "text": f"scene {name} moves on"} for name in names]
    Path("clips/clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("model.chunk_frames=8", "model.queries=8", "model.codec.image_size=[16, 32]"),
        *("model.num_inference_steps=2", "model.condition_adapter.width=32"),
        *("model.condition_adapter.num_layers=1", "model.condition_adapter.num_heads=2"),
    ]


def pandora(tokenizer: PreTrainedTokenizerBase, tiny: SimpleNamespace) -> list[str]:
    """Write the parts and the data of `pandora`."""
    torch.manual_seed(0)
    llama = AutoConfig.for_model(**DECODER | {"model_type": "llama", "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(llama).save_pretrained("models/vicuna-7b-v1.5")
    tokenizer.save_pretrained("models/vicuna-7b-v1.5")
    sizes = {name: value for name, value in SIGLIP.items() if name != "model_type"}
    CLIPVisionModel(CLIPVisionConfig(**sizes)).save_pretrained("models/clip-vit-large-patch14")
    text = {"d_model": tiny.TEXT, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    text |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    diffusers.CogVideoXImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=T5EncoderModel(T5Config(**text)).eval(),
        vae=tiny.vae("cog1.5-i2v"),
        transformer=tiny.transformer("cog1.5-i2v", max_text_seq_length=77),
        scheduler=tiny.scheduler("cog"),
    ).save_pretrained("models/CogVideoX1.5-5B-I2V")
    names = write_clips(Path("webvid/videos/page"), 8)
    rows = [f'{name},https://example.org/{name}.mp4,page,"scene {name} moves on"' for name in names]
    Path("webvid/results_10M_train.csv").write_text(
        "\n".join(["videoid,contentUrl,page_dir,name", *rows]) + "\n"
    )
    return [
        *("model.chunk_frames=8", "model.queries=8", "model.codec.image_size=[16, 32]"),
        *("model.codec.latent_channels=4", "model.num_inference_steps=2", "model.vision.num_tokens=8"),
        *("model.vision.width=64", "model.condition_adapter.width=64", "model.vision.max_frames=2"),
        *("model.condition_adapter.num_layers=1", "model.condition_adapter.num_heads=4"),
    ]
