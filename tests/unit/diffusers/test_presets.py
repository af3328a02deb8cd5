"""The gate of the presets: each by the commands of its header, in small, from its data to a played round.

Recorded; trained through all stages on one process and on two, each stage stopped once after its first step
and resumed; exported; copied to where nothing else is, caches included; played for three rounds by the
command line, and one over HTTP. Where a header trains pretrained parts, there are tiny ones of the same
classes with random weights; environments, where they are installed, are the real ones. The seconds of every
step are printed at the end as the table of docs/reference/presets.md.
"""

import itertools
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
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
from processes import torchrun
from safetensors.torch import save_file
from served import frames_of, local
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerBase,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from worldmodel import config as configs
from worldmodel import media
from worldmodel.cli import main
from worldmodel.models.loading.location import resolve
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune
from worldmodel.train.checkpoint import checkpointer
from worldmodel.train.run import settings
from worldmodel.train.run.log import read_metrics

SHORTER = {"--episodes": "8", "--max-steps": "12", "--workers": "0", "--twins": "2"}
"""Values of `worldmodel record` in place of the header's."""
GAMES = {"minigrid": "minigrid", "crafter": "crafter", "gym_pusht": "gym_pusht"}
GAMES |= {
    f"worldmodel.games.{name}": package for name, package in (("vizdoom", "vizdoom"), ("coinrun", "envpool"))
}
"""Packages of the environments, by what stands before the colon of their names."""
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
LARGE = ("evening", "pan", "pandora")
BASE = ["model.backbone.pretrained=base", "model.backbone.num_layers=2"]
CLIP_S = 4
"""Length of the clips."""
ALONE = ["mesh.dp_replicate=1"]
"""Settings of one process."""


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


def trainings(name: str) -> list[list[str]]:
    """Return what the commands of a header that train give to it: a config and its overrides."""
    found = []
    for program, *words in header(name):
        if program == "torchrun":
            found.append(words[words.index("worldmodel.train.finetune") + 1 :])
        elif words[0] == "train":
            found.append(words[1:])
    return found


ROWS = [(name, number) for name in CONFIGS for number in range(max(1, len(trainings(name))))]
Steps = Callable[[str], Any]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), ROWS, ids=[f"{name}-{number}" for name, number in ROWS])
def test_a_preset_by_its_commands(
    name: str,
    number: int,
    request: pytest.FixtureRequest,
    workplace: Callable[[str, int], list[str]],
    steps: Steps,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name.startswith("shapes") and request.config.getoption("only_changed"):
        pytest.skip("make test-all runs the many stages of the shapes worlds")
    given = trainings(name)[number]
    assert given[0] == name
    small = workplace(name, number)
    with steps("record"):
        for words in recordings(name):
            assert main(words) == 0, capsys.readouterr().err
    with steps("one process"):
        train(given, [*small, *ALONE])
    run = Path(settings.load(name, [*given[1:], *small]).run_dir)
    with steps("two processes"):
        Path("two.json").write_text(json.dumps([given, [*small, "run_dir=two"]]))
        torchrun(__file__, 2, "two.json")
    assert_alike(run, Path("two"))
    with steps("export"):
        newest = checkpointer.latest(Path("two"))
        assert newest is not None
        assert main(["export", str(newest), "exported"]) == 0, capsys.readouterr().err
    play_elsewhere(run, steps, capsys)


def test_every_preset_says_how_to_train_it() -> None:
    assert all(trainings(name) for name in CONFIGS)


def test_the_page_lists_every_row() -> None:
    page = (ROOT / "docs" / "reference" / "presets.md").read_text()
    table = page[page.index("| Row |") :].split("\n\n")[0]
    listed = {
        cells[1].strip(): cells[2].strip() for line in table.splitlines()[2:] if (cells := line.split("|"))
    }
    assert list(listed) == [f"{name}-{number}" for name, number in ROWS]
    for name, number in ROWS:
        stages = configs.load(name, trainings(name)[number][1:]).stages
        assert listed[f"{name}-{number}"] == ", ".join(stages)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_the_plan_of_a_header_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = [words for _, *words in header(name) if words[:2] == ["info", "--plan"]]
    assert plans
    for words in plans:
        assert main(words) == 0
        assert "yes" in capsys.readouterr().out, shlex.join(words)


def recordings(name: str) -> Iterator[list[str]]:
    """Yield the commands that write the data of a preset; games that are not installed have a stand-in."""
    for program, *words in header(name):
        if program != "worldmodel" or words[0] not in ("record", "data"):
            continue
        words = [SHORTER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        package = GAMES.get(words[1].split(":")[0]) if words[0] == "record" else None
        if package is not None and find_spec(package) is None:
            words = stand_in(name, words[words.index("--out") + 1])
        yield words
    if name == "codec_games":  # its header refers to that of another config
        yield stand_in(name, "pusht")


def stand_in(name: str, folder: str) -> list[str]:
    """Return the command that records a board in place of a game; it has the keys of the preset."""
    keys = settings.load(name).model.action.as_dict().get("keys") or [f"key_{n}" for n in range(9)]
    words = ["record", "board:Board-v0", "--out", folder, "--keys", ",".join(keys)]
    return [*words, *itertools.chain(*SHORTER.items())]


def assert_alike(one: Path, two: Path) -> None:
    """Check that two runs have the same losses: at first exactly, since later ones amplify the rounding."""
    expected, found = read_metrics(one), read_metrics(two)
    assert expected.keys() == found.keys()
    first, *_ = expected
    for stage, records in expected.items():
        for number, record in records.items():
            for name, value in record.items():
                if name.endswith("/loss"):
                    exact = (stage, number) == (first, 1)
                    assert found[stage][number][name] == pytest.approx(value, rel=1e-4 if exact else 0.05), (
                        name
                    )


@pytest.mark.parametrize("name", LARGE)
def test_headers_name_the_columns(name: str) -> None:
    config = settings.load(name)
    assert all(each.preset or "video" in each.columns for each in config.data.sources.values())


def shortened(given: Sequence[str], small: Sequence[str]) -> list[str]:
    """Return the overrides with which every stage has two steps of two episodes."""
    config = settings.load(given[0], [*given[1:], *small])
    steps = [f"stages.{stage}.{key}=2" for stage in config.stages for key in ("steps", "batch_size")]
    rounds = [f"stages.{stage}.rounds=3" for stage, each in config.stages.items() if each.rounds > 3]
    validation = ["validation.every=2", "validation.batches=1"] if config.validation.source else []
    rest = ["checkpoint_every=1", "precision=fp32", "sample_every=0", "data.num_workers=0", "log_every=1"]
    return [*small, *steps, *rounds, *validation, "validation.codec_frames=16", *rest]


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


def play_elsewhere(run: Path, steps: Steps, capsys: pytest.CaptureFixture[str]) -> None:
    """Copy both models of a run to where nothing else is; play three rounds of each, and one over HTTP."""
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
                base, found = model / "backbone" / "base.json", None
                if base.is_file():
                    assert main(["rollout", "start.png", "wait", "--model", "model"]) == 2
                    assert "--base" in capsys.readouterr().err
                    known = Path(json.loads(base.read_text())["folder"]).relative_to(here)
                    found = str(here / f"{known.parts[0]}-away" / Path(*known.parts[1:]))
                words = ["rollout", "start.png", "wait", "--rounds", "3", "--model", "model", "--out", "out"]
                few = ["--num-inference-steps", "2"] if config["generator"] else []
                with steps("roll out"):
                    assert main([*words, *few, *(["--base", found] if found else [])]) == 0, (
                        capsys.readouterr().err
                    )
                assert (there / "out" / "rollout.mp4").stat().st_size
                if not number:
                    with steps("serve"):
                        serve_a_round(WorldModel.from_pretrained(model, base=found), there, (height, width))
            finally:
                for part in away:
                    (here / f"{part}-away").rename(here / part)
                patch.chdir(here)


def serve_a_round(model: WorldModel, folder: Path, size: tuple[int, int]) -> None:
    """Create a world from an image over HTTP, and play a round of it."""
    few = {"num_inference_steps": "2"} if model.config.generator else {}
    with local(model.eval(), folder / "server") as client:
        upload = {"observation": ("start.png", (folder / "start.png").read_bytes())}
        created = client.post("/v1/worlds", files=upload, data=few)
        assert created.status_code in (200, 201), created.text
        body = {"step_id": 1, "action": None}  # it goes on without one, whatever kinds it takes
        path = f"/v1/worlds/{created.json()['id']}/step"
        frames = frames_of(client.post(path, json=body, params={"format": "npy"}))
    assert frames.shape == (model.config.chunk_frames, *size, 3)


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> Steps:
    """Measure the steps of a preset, for the table that `conftest.py` prints."""
    seconds: dict[str, float] = {}
    request.node.user_properties.append(("steps", (request.node.callspec.id, seconds)))

    @contextmanager
    def measure(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield  # a step that fails has no time
        seconds[name] = round(seconds.get(name, 0.0) + time.perf_counter() - begun, 1)

    return measure


@pytest.fixture
def workplace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny: SimpleNamespace,
    tokenizer: PreTrainedTokenizerBase,
    pipeline: Callable[..., tuple[Path, Any]],
) -> Callable[[str, int], list[str]]:
    """Make a folder to run a preset in, with what it needs beside its data; returns overrides of sizes."""

    def make(name: str, number: int) -> list[str]:
        place = tmp_path / "place"
        place.mkdir()
        monkeypatch.chdir(place)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        if settings.load(name).model.backbone.pretrained == "smollm2-135m-instruct":
            shutil.copytree(resolve("shapes-tiny") / "backbone", "base")
        if name == "dit_pretrain":
            return BASE
        if name in ("shapes_smol", "shapes_wan"):  # what they begin from is of a larger language model
            none = "all: null, generator: null, condition_adapter.to_cells: null"
            return [*BASE, f"init_from={{{none}, codec: shapes-tiny}}"]
        if name == "evening":
            return evening(tokenizer, pipeline, tiny, ("wan", "ltx", "wan-causal")[number])
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


def evening(
    tokenizer: PreTrainedTokenizerBase,
    pipeline: Callable[..., tuple[Path, Any]],
    tiny: SimpleNamespace,
    kind: str,
) -> list[str]:
    """Write the parts and the data of `evening`, without the text encoder, which it does not need."""
    folder, whole = pipeline(tiny.family(kind))
    shutil.rmtree(folder / "text_encoder")
    Path("models").mkdir()
    shutil.move(folder, "models/LTX-Video" if kind == "ltx" else "models/Wan2.1-T2V-1.3B-Diffusers")
    if kind == "wan-causal":
        whole.transformer.save_config("models/self-forcing")
        weights = tiny.original_names(whole.transformer, "model.")
        save_file(weights, "models/self-forcing/self_forcing_dmd.safetensors")
    torch.manual_seed(0)
    decoder = AutoConfig.for_model(**DECODER | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(decoder).save_pretrained("models/Qwen3-0.6B")
    tokenizer.save_pretrained("models/Qwen3-0.6B")
    sizes = {name: value for name, value in SIGLIP.items() if name != "model_type"}
    SiglipVisionModel(SiglipVisionConfig(**sizes)).save_pretrained("models/siglip-base-patch16-224")
    names = write_clips(Path("clips"), 16)
    rows = [{"path": f"{name}.mp4", "text": f"scene {name} moves on"} for name in names]
    Path("clips/clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    latents = {"latent_channels": 8, "spatial_factor": 8, "temporal_factor": 4} if kind == "ltx" else {}
    return [
        *([] if kind == "wan-causal" else ["model.chunk_frames=8"]),
        *("model.queries=8", "model.codec.image_size=[16, 32]"),
        *("model.num_inference_steps=2", "model.condition_adapter.width=32"),
        *("model.condition_adapter.num_layers=1", "model.condition_adapter.num_heads=2"),
        *(f"model.codec.{name}={value}" for name, value in latents.items()),
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


if __name__ == "__main__":  # one of two processes
    train(*json.loads(Path(sys.argv[1]).read_text()))
