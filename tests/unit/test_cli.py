"""The command line: results of every verb, and user errors with exit code 2."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import worldmodel
from worldmodel import config as configs
from worldmodel import media
from worldmodel.actions import Action
from worldmodel.cli import VERBS, main
from worldmodel.cli.info import read_card
from worldmodel.models.loading.location import resolve
from worldmodel.models.loading.model_folder import read_config, read_tasks
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.action_list import parse_action

LEFT = "the red ball moves left"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: np.ndarray) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(image).save("frame.png")


@pytest.fixture
def run(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line; MODEL stands for the tiny model's folder."""

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(model_folder) if word == "MODEL" else word for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def everything() -> set[str]:
    return {str(path) for path in Path().rglob("*")}


# Each verb


def test_rollout_writes_three_files(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run(
        "rollout", "frame.png", LEFT, "keys:left+right", "--model", "MODEL", "wait", "--out", "o/p"
    )
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()[:3]] == ["round 1/3", "round 2/3", "round 3/3"]
    assert "frames/s" in out.splitlines()[0]
    assert sorted(path.name for path in Path("o/p").iterdir()) == ["rollout.gif", "rollout.mp4", "sheet.png"]
    for name in ("rollout.gif", "rollout.mp4"):
        assert f"o/p/{name}" in out
        assert len(media.read_video(Path("o/p", name), size=32, fps=None, max_frames=99)) == 1 + 3 * 8


def test_rollout_repeats_and_cuts_the_list(run: Callable[..., tuple[int, str, str]]) -> None:
    for words, rounds in ((["a", "b"], 3), (["a", "b", "wait"], 2)):
        code, out, _ = run("rollout", "frame.png", *words, "--rounds", str(rounds), "--model", "MODEL")
        assert code == 0
        actions = [line.split()[2] for line in out.splitlines() if line.startswith("round")]
        assert actions == (["a", "b"] * 2)[:rounds]


def test_rollout_from_words_alone_with_a_file_of_actions(run: Callable[..., tuple[int, str, str]]) -> None:
    Path("actions.txt").write_text(f"# comment\n\n{LEFT}\nvector:0.5,-1,2\n")
    words = ("rollout", "--text", "night background, nothing", "--actions", "actions.txt", "--model", "MODEL")
    code, out, _ = run(*words, "--seed", "7", "--num-inference-steps", "1", "--guidance-scale", "1.5")
    assert code == 0
    assert out.count("round ") == 2
    first = Path("outputs/rollout/rollout.gif").read_bytes()
    run(*words, "--seed", "7", "--num-inference-steps", "1", "--guidance-scale", "1.5")
    assert Path("outputs/rollout/rollout.gif").read_bytes() == first
    run(*words, "--seed", "8")
    assert Path("outputs/rollout/rollout.gif").read_bytes() != first


@pytest.mark.parametrize("seed", ["-1", "1.5", "x", str(2**63)])
@pytest.mark.parametrize(
    "words", [["rollout", "frame.png", "wait"], ["eval", "MODEL"], ["data", "check", "a"]]
)
def test_seeds_out_of_range_are_one_clear_error(
    run: Callable[..., tuple[int, str, str]], words: list[str], seed: str
) -> None:
    code, _, shown = run(*words, "--seed", seed)
    assert code == 2
    assert "--seed" in shown and "use 0 to" in shown and "Traceback" not in shown


def test_describe_asks_and_compares(run: Callable[..., tuple[int, str, str]]) -> None:
    for extra in ([], ["how many things are there"], ["--after", "frame.png"]):
        code, out, _ = run("describe", "frame.png", *extra, "--model", "MODEL")
        assert code == 0
        assert out.endswith("\n")


def test_info_counts_parameters(run: Callable[..., tuple[int, str, str]], model: WorldModel) -> None:
    code, out, _ = run("info", "MODEL", "--json")
    facts = json.loads(out)
    assert code == 0
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    for name in ("backbone", "vision", "action", "condition_adapter", "generator"):
        assert facts["components"][name]["parameters"] == parts[name]
    assert facts["components"]["codec"]["parameters"] == parts["codec"] + 8  # with its scale
    assert facts["actions"] == {
        "text": "up to 64 tokens",
        "keys": ["left", "right"],
        "mouse": "none",
        "vector": "3 numbers",
        "camera": "none",
    }
    assert facts["frames"]["image_size"] == 32
    code, out, _ = run("info", "MODEL")
    assert code == 0
    assert "M parameters" in out


def test_info_prints_figures_where_asked(run: Callable[..., tuple[int, str, str]]) -> None:
    short, long = (run("info", "shapes-tiny", *options)[1] for options in ((), ("--figures",)))
    count = len(json.loads(run("info", "shapes-tiny", "--json")[1])["figures"])
    assert f"{count} in the model card" in short and len(short.splitlines()) < 35
    assert len(long.splitlines()) == len(short.splitlines()) + count and "|" not in long


RUN_A_MODEL = ("rollout", "describe", "eval", "first-steps", "plan", "serve")


@pytest.mark.parametrize("verb", RUN_A_MODEL)
def test_verbs_that_run_a_model_have_one_option_for_its_device(
    run: Callable[..., tuple[int, str, str]], verb: str
) -> None:
    (about,) = re.findall(r"--device DEVICE\s(.*?\))", run(verb, "--help")[1], flags=re.DOTALL)
    assert " ".join(about.split()) == (
        "device of the model, for example cpu or cuda (default: cuda if available)"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("rollout", "frame.png", LEFT, "--model", "MODEL"),
        ("describe", "frame.png", "--model", "MODEL"),
        ("first-steps", "--model", "MODEL"),
        ("plan", "MODEL", "--start", "frame.png", "--goal", "frame.png"),
    ],
    ids=lambda words: words[0],
)
def test_the_device_is_that_of_the_option(run: Callable[..., tuple[int, str, str]], words: tuple) -> None:
    code, _, err = run(*words, "--device", "abacus")
    assert code == 2 and "'abacus'" in err


@pytest.mark.parametrize("name", ["minigrid-doorkey", "shapes-memory", "shapes-smol", "shapes-tiny"])
def test_info_names_the_tasks_of_shipped_models(run: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, out, _ = run("info", name, "--json")
    assert code == 0
    assert "rounds" in json.loads(out)["tasks"]


@pytest.mark.parametrize("training", [["state"], {"stages": ["state"]}, {"stages": {"state": {"tasks": 1}}}])
def test_odd_training_records_are_ignored(tmp_path: Path, training: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"training": training}))
    assert read_tasks(tmp_path) is None


def test_info_reads_the_card(tmp_path: Path) -> None:
    card = "---\nlicense: apache-2.0\n---\n| figure | value |\n|---|---|\n| strict | 92 % |\n| PSNR | 30 |\n"
    (tmp_path / "README.md").write_text(card)
    assert read_card(tmp_path / "README.md") == ("apache-2.0", {"strict": "92 %", "PSNR": "30"})
    assert read_card(tmp_path / "none.md") == (None, {})


def test_config_lists_and_explains(run: Callable[..., tuple[int, str, str]]) -> None:
    assert "shapes_tiny" in run("config")[1].split()
    code, out, _ = run("config", "shapes_tiny", "seed=3", "stages.state.lr=1e-5")
    assert code == 0
    assert (
        "# [height, width] of a frame in pixels, or the side of a square; multiples of `spatial_factor`."
        in out
    )
    Path("again.yaml").write_text(out)
    assert configs.load("again.yaml") == configs.load("shapes_tiny", ["seed=3", "stages.state.lr=1e-5"])


def test_config_has_the_settings_of_the_model_that_it_names(run: Callable[..., tuple[int, str, str]]) -> None:
    made = yaml.safe_load(run("config", "own_clips", "model.pace=on_action")[1])["model"]
    named = configs.to_dict(read_config(resolve("shapes-tiny")))
    assert made["backbone"] == named["backbone"]
    assert made["pace"] == "on_action" != named["pace"]


def test_the_module_of_training_is_its_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune.py", "no_such_config"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("worldmodel.train.finetune", run_name="__main__")
    assert ended.value.code == 2
    assert "no_such_config" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("-m", "worldmodel.train.finetune"), ("train/finetune.py",)])
def test_scripts_run_the_verb_of_the_same_name(launcher: tuple[str, ...]) -> None:
    root = Path(__file__).parents[2]
    words = [str(root / word) if word.endswith(".py") else word for word in launcher]
    done = subprocess.run(
        [sys.executable, "-P", *words, "no_such_config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no_such_config" in done.stderr
    assert "error: " in done.stderr


def test_publish_names_a_run_without_a_model(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("publish", "no-run", "folder")
    assert code == 2
    assert "no-run" in err


def test_record_writes_clips_to_train_on(run: Callable[..., tuple[int, str, str]]) -> None:
    command = ("record", "shapes", "--out", "clips", "--rounds", "1")
    assert run(*command, "--episodes", "1")[0] == 0
    names = {path.name for path in Path("clips").iterdir()}
    assert names == {"clip-00000.mp4", "clips.jsonl", "recording.json"}
    assert run(*command, "--episodes", "0")[0] == 2
    assert run(*command, "--size", "63")[0] == 2
    assert run("record", "Nothing-v7", "--out", "poles")[0] == 2


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_teaches_with_an_example(run: Callable[..., tuple[int, str, str]], verb: str) -> None:
    code, out, err = run(*verb.split(), "--help")
    assert (code, err) == (0, "")
    assert "example:\n  worldmodel " in out


def test_version(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("--version")[:2] == (0, f"worldmodel {worldmodel.__version__}\n")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from worldmodel.cli import main; main(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'omegaconf', 'av')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# Mistakes


def rollout(*words: str) -> tuple[str, ...]:
    return ("rollout", *words, "--model", "MODEL")


MISTAKES: dict[str, tuple[str, ...]] = {
    "no verb": (),
    "unknown verb": ("rolout",),
    "unknown option": ("rollout", "frame.png", LEFT, "--frames", "3"),
    "no observation": ("rollout",),
    "no action": ("rollout", "frame.png"),
    "not a number": rollout("frame.png", LEFT, "--rounds", "many"),
    "zero rounds": rollout("frame.png", LEFT, "--rounds", "0"),
    "too many rounds": rollout("frame.png", LEFT, "--rounds", "1000000"),
    "negative steps": rollout("frame.png", LEFT, "--num-inference-steps", "-1"),
    "guidance is nan": rollout("frame.png", LEFT, "--guidance-scale", "nan"),
    "actions twice": rollout("frame.png", LEFT, "--actions", "text.txt"),
    "no actions file": rollout("frame.png", "--actions", "none.txt"),
    "actions file is a folder": rollout("frame.png", "--actions", "folder"),
    "actions file is an image": rollout("frame.png", "--actions", "frame.png"),
    "actions file is empty": rollout("frame.png", "--actions", "empty.png"),
    "missing image": rollout("none.png", LEFT),
    "image is text": rollout("text.txt", LEFT),
    "image is named png": rollout("fake.png", LEFT),
    "image is empty": rollout("empty.png", LEFT),
    "image is a folder": rollout("folder", LEFT),
    "image is an address": rollout("https://host/frame.png", LEFT),
    "image is truncated": rollout("cut.png", LEFT),
    "image is tiny": rollout("tiny.png", LEFT),
    "image is huge": rollout("huge.png", LEFT),
    "video is truncated": rollout("cut.mp4", LEFT),
    "video is damaged": rollout("noise.mp4", LEFT),
    "empty action": rollout("frame.png", " "),
    "10,000-word action": rollout("frame.png", "left " * 10_000),
    "empty caption": rollout("--text", " ", LEFT),
    "unknown key": rollout("frame.png", "keys:jump"),
    "misspelt key": rollout("frame.png", "keys:lefft+right"),
    "empty key": rollout("frame.png", "keys:left+"),
    "vector of words": rollout("frame.png", "vector:a,b,c"),
    "vector too short": rollout("frame.png", "vector:1,2"),
    "vector not finite": rollout("frame.png", "vector:1,nan,2"),
    "unknown model": ("rollout", "frame.png", LEFT, "--model", "shapes-tony"),
    "model is a file": ("rollout", "frame.png", LEFT, "--model", "frame.png"),
    "model without config": ("rollout", "frame.png", LEFT, "--model", "folder"),
    "model is pickled": ("rollout", "frame.png", LEFT, "--model", "pickled"),
    "output is a file": rollout("frame.png", LEFT, "--out", "text.txt"),
    "output is below a file": rollout("frame.png", LEFT, "--out", "text.txt/deeper"),
    "output cannot be written": rollout("frame.png", LEFT, "--out", "/proc/none"),
    "describe nothing": ("describe",),
    "describe with an empty question": ("describe", "frame.png", " ", "--model", "MODEL"),
    "describe asks two things": ("describe", "frame.png", "why", "--after", "frame.png", "--model", "MODEL"),
    "describe after nothing": ("describe", "frame.png", "--after", "none.png", "--model", "MODEL"),
    "info of nothing": ("info", "no-such-model"),
    "info of a pickled model": ("info", "text.txt"),
    "config of nothing": ("config", "no_such_config"),
    "config with an unknown key": ("config", "shapes_tiny", "sead=1"),
    "config with a wrong value": ("config", "shapes_tiny", "seed=one"),
    "train without a config": ("train",),
    "train with a missing config": ("train", "no_such_config"),
}


@pytest.fixture
def _things_in_the_way(image: np.ndarray) -> None:
    Path("folder").mkdir()
    Path("pickled").mkdir()
    Path("pickled/config.json").write_text("{}")
    Path("pickled/weights.pt").write_bytes(b"\x80\x04.")
    Path("text.txt").write_text("the red ball moves left\n")
    Path("empty.png").touch()
    Path("fake.png").write_text("not an image")
    Path("cut.png").write_bytes(Path("frame.png").read_bytes()[:90])
    Image.new("RGB", (1, 400)).save("tiny.png")
    Image.new("1", (8000, 8000)).save("huge.png")
    media.write_video(np.stack([image] * 8), "clip.mp4", fps=8)
    data = Path("clip.mp4").read_bytes()
    Path("clip.mp4").unlink()
    Path("cut.mp4").write_bytes(data[: len(data) * 2 // 3])
    Path("noise.mp4").write_bytes(
        data[:64] + bytes(np.random.default_rng(0).integers(0, 256, 999, dtype=np.uint8))
    )


@pytest.mark.usefixtures("_things_in_the_way")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_user_errors_are_one_sentence(run: Callable[..., tuple[int, str, str]], mistake: str) -> None:
    before = everything()
    code, out, err = run(*MISTAKES[mistake])
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 400
    assert out == ""
    assert everything() == before


def test_files_of_an_earlier_run_stay_when_a_run_fails(run: Callable[..., tuple[int, str, str]]) -> None:
    run(*rollout("frame.png", LEFT, "--out", "o"))
    before = {path: path.read_bytes() for path in Path("o").iterdir()}
    assert run(*rollout("frame.png", "keys:jump", "--out", "o"))[0] == 2
    assert {path: path.read_bytes() for path in Path("o").iterdir()} == before


def test_ctrl_c_leaves_nothing(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("worldmodel.cli.rollout.play", interrupt)
    before = everything()
    code, _, err = run(*rollout("frame.png", LEFT, "--out", "deep/er"))
    assert code == 130
    assert "Traceback" not in err
    assert everything() == before


@pytest.mark.parametrize(
    ("word", "action"),
    [
        (" the ball grows ", Action("the ball grows")),
        ("wait", Action()),
        ("keys:red+left", Action(keys=("red", "left"))),
        ("vector:1, -2.5,0", Action(vector=(1.0, -2.5, 0.0))),
        ("look: a ball", Action("look: a ball")),
    ],
)
def test_actions_as_words(word: str, action: Action) -> None:
    assert parse_action(word) == action


def test_first_steps_write_what_they_list(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("first-steps", "--model", "MODEL", "--out", "steps")
    assert code == 0
    names = {"rollout.mp4", "rollout.gif", "rollout.png", "futures.png", "imagined.png"}
    assert {path.name for path in Path("steps").iterdir()} == names
    assert all(f"steps/{name}" in out for name in names)
    assert run("first-steps", "--model", "nothing", "--out", "other")[0] == 2
    assert not Path("other").exists()
