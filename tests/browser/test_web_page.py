"""Worlds that play in a browser without a server: their frames are those of a Python session."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from accessibility import findings
from firefox import Firefox
from PIL import Image

from worldmodel import WorldModel, start_images
from worldmodel.actions.camera import CameraKind
from worldmodel.config import ActionConfig, StateConfig

pytestmark = pytest.mark.slow
PATIENCE_MS = 60_000
ROOT = Path(__file__).parents[2]
ROUNDS = 20
MOST = 2
"""Levels of 255 by which a frame may differ: the runtime of the browser adds in another order."""

PLAY = (Path(__file__).parent / "play_world.js").read_text(encoding="utf-8")


@contextmanager
def served(folder: Path, headers: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Serve a folder as any static web server does, with more headers; yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def end_headers(self) -> None:
            for name, value in headers.items():
                self.send_header(name, value)
            super().end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def export(model: str | Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the documented command, without the checks of shapes, which the exporter cannot trace."""
    command = [sys.executable, "-m", "worldmodel", "export", str(model), "--web", str(target), *options]
    environment = os.environ | {"JAXTYPING_DISABLE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | Path], Path]:
    """Exports a model once; skips where the libraries cannot be fetched."""
    done: dict[str, Path] = {}

    def make(model: str | Path) -> Path:
        if str(model) not in done:
            target = tmp_path_factory.mktemp("web") / "world"
            result = export(model, target)
            if "cannot be fetched" in result.stderr:
                pytest.skip(result.stderr.strip())
            assert result.returncode == 0, result.stderr
            done[str(model)] = target
        return done[str(model)]

    return make


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new page; errors in it fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, accept_downloads=True)
    page, errors = context.new_page(), []
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []


def rgba(frame: np.ndarray) -> str:
    opaque = np.full((*frame.shape[:2], 1), 255, np.uint8)
    return base64.b64encode(np.concatenate([frame, opaque], axis=2).tobytes()).decode()


def decoded(rounds: Sequence[dict[str, Any]], shape: tuple[int, int]) -> list[np.ndarray]:
    return [
        np.frombuffer(base64.b64decode(each["frames"]), np.uint8).reshape(-1, *shape, 4)[..., :3]
        for each in rounds
    ]


def farthest(found: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> int:
    pairs = zip(found, truth, strict=True)
    return max(int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in pairs)


SENTENCES = [
    "the red ball moves left",
    {"keys": ["blue", "jump"]},
    None,
    "everything explodes",
    "the box grows",
]
KEYS = ["forward", "left", "forward", "pickup", "right", "toggle", "drop"]


def film(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Return what `play_world.js` is to play of a shipped world, and the results of a Python session."""
    model = WorldModel.from_pretrained(name)
    start = np.asarray(start_images(model)[0].image)
    if name == "minigrid-doorkey":
        actions: list[Any] = [{"keys": [KEYS[i % len(KEYS)]]} for i in range(ROUNDS)]
    else:
        actions = [SENTENCES[i % len(SENTENCES)] for i in range(ROUNDS)]
    session = model.session(seed=3, num_inference_steps=0)
    session.reset(start)
    truth = [session.step(action) for action in actions]
    sent = [{"text": each} if isinstance(each, str) else each for each in actions]
    return {"start": {"rgba": rgba(start)}, "seed": 3, "actions": sent}, truth


@pytest.mark.parametrize("name", ["minigrid-doorkey", "shapes-tiny", "shapes-memory"])
def test_shipped_worlds_play_as_in_python(
    name: str, exported: Callable[[str], Path], page: Any, record_property: Callable[[str, object], None]
) -> None:
    asked, truth = film(name)
    with served(exported(name)) as address:
        page.goto(address)
        rounds = page.evaluate(PLAY, asked)

    assert farthest(decoded(rounds, truth[0].frames.shape[1:3]), [each.frames for each in truth]) <= MOST
    for made, each in zip(rounds, truth, strict=True):
        assert (made["outcome"] is None) == (each.outcome is None)
        if each.outcome is not None:
            assert made["outcome"]["ended"] == each.outcome.ended
            assert made["outcome"]["reward"] == pytest.approx(each.outcome.reward, abs=1e-3)
    took = [float(each["took"]) for each in rounds[-10:]]
    record_property("rounds_per_second", 1000 * len(took) / sum(took))


def test_firefox_plays_as_python(exported: Callable[[str], Path], tmp_path: Path) -> None:
    executable = shutil.which("firefox-esr") or shutil.which("firefox")
    if executable is None:
        pytest.skip("Firefox is not installed (`apt-get install firefox-esr`)")
    asked, truth = film("minigrid-doorkey")
    with served(exported("minigrid-doorkey")) as address, Firefox(executable, tmp_path) as firefox:
        firefox.goto(address)
        rounds = firefox.evaluate(PLAY, asked)
        assert farthest(decoded(rounds, (48, 48)), [each.frames for each in truth]) <= MOST
        firefox.evaluate(CLICK_AND_PRESS)


CLICK_AND_PRESS = """async () => {
  const screen = document.getElementById("screen");
  const until = async (round) => {
    while (screen.dataset.round !== round) await new Promise((resolve) => setTimeout(resolve, 50));
    return screen.toDataURL();
  };
  document.querySelector("#tiles button").click();
  const before = await until("0");
  const key = { key: "ArrowRight", code: "ArrowRight", bubbles: true };
  document.body.dispatchEvent(new KeyboardEvent("keydown", key));
  if ((await until("1")) === before) throw new Error("the picture is the same");
}"""
"""Starts a world on the page and turns; fails if nothing changes."""


def test_a_world_begins_from_a_text_as_in_python(exported: Callable[[str], Path], page: Any) -> None:
    session = WorldModel.from_pretrained("shapes-tiny").session(seed=1, num_inference_steps=0)
    first = session.reset(text="a large red ball and a small blue box")
    truth = [first, session.step("the red ball jumps").frames]
    with served(exported("shapes-tiny")) as address:
        page.goto(address)
        start, actions = {"text": "a large red ball and a small blue box"}, [{"text": "the red ball jumps"}]
        rounds = page.evaluate(PLAY, {"start": start, "seed": 1, "actions": actions})
    assert farthest(decoded(rounds, (64, 64)), truth) <= MOST


KINDS = {
    "a code": {
        "state": StateConfig(width=32, num_layers=1, num_heads=2, code_groups=3, code_classes=8),
        "generator": None,
        "num_inference_steps": 0,
    },
    "a vector with bounds": {
        "query_actions": True,
        "action": ActionConfig(vector={"low": [-2, 0], "high": [2, 5]}, keys=("go",)),
    },
    "several actions in a round": {
        "query_actions": True,
        "action": ActionConfig(
            text={"max_tokens": 16}, keys=("left", "right"), vector=2, mouse=True, per_round=4
        ),
    },
    "several context frames, and frames that are not square": {"context_latents": 6, "image_size": (32, 48)},
    "all kinds of action": {
        "query_actions": True,
        "action": ActionConfig(
            text={"max_tokens": 32},
            keys=("left", "right"),
            vector={"names": ("push_right", "push_down"), "low": (-24, -24), "high": (24, 24)},
            mouse="drag",
            camera=True,
        ),
    },
}
TURN, FORWARD = ({"camera": button["value"]} for button in CameraKind().widget(True)["buttons"][:2])
ACTIONS = {
    "a code": ["go on", {"keys": ["left"]}, None],
    "a vector with bounds": [{"vector": [1.5, 3.0]}, {"keys": ["go"]}, {"keys": ["go"], "vector": [-2, 0]}],
    "several actions in a round": [
        {
            "chunk": [
                {"vector": [1.0, -1.0]},
                {"mouse": [0.5, 0.1], "vector": [0.1, 0.2]},
                {"text": "stop"},
                {},
            ]
        },
        {"keys": ["right"]},
        None,
    ],
    "several context frames, and frames that are not square": ["go on", None, {"vector": [1, 2, 3]}],
    "all kinds of action": [
        FORWARD | {"text": "go on", "keys": ["left"]},
        TURN | {"vector": [12, -24]},
        {"mouse": [0.2, 0.7, 0.1, -0.3]},
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_plays_as_in_python(
    kind: str,
    exported: Callable[[Path], Path],
    make_model: Callable[..., WorldModel],
    page: Any,
    tmp_path: Path,
) -> None:
    # Weights of a page are in bf16, so the model's are, too.
    model = make_model(seed=2, **KINDS[kind]).bfloat16().float()
    folder = model.save_pretrained(tmp_path / "model")
    model = WorldModel.from_pretrained(folder)
    size = model.config.codec.image_size
    shape = (size, size) if isinstance(size, int) else tuple(size)
    start = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    actions = [ACTIONS[kind][i % 3] for i in range(9)]
    session = model.session(seed=12, num_inference_steps=0)
    session.reset(start)
    truth = [session.step(action) for action in actions]
    with served(exported(folder)) as address:
        page.goto(address)
        sent = [{"text": each} if isinstance(each, str) else each for each in actions]
        rounds = page.evaluate(PLAY, {"start": {"rgba": rgba(start)}, "seed": 12, "actions": sent})
    assert farthest(decoded(rounds, shape), [each.frames for each in truth]) <= MOST
    for made, each in zip(rounds, truth, strict=True):
        assert (made["probability"] is None) == (kind != "a code")
        if kind == "a code":
            assert each.state is not None
            assert made["probability"] == pytest.approx(np.exp(each.state.log_probability), rel=1e-2)


def play(page: Any, *keys: str) -> None:
    """Press keys, each once its round is shown."""
    for key in keys:
        shown = int(page.get_attribute("#screen", "data-round"))
        page.keyboard.press(key)
        page.wait_for_selector(f'#screen[data-round="{shown + 1}"]')


def picture(page: Any) -> np.ndarray:
    """Return the pixels of the canvas."""
    data = page.evaluate("document.getElementById('screen').toDataURL('image/png')")
    return np.asarray(Image.open(BytesIO(base64.b64decode(data.split(",")[1]))).convert("RGB"))


def colours(picture: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(each) for each in np.unique(picture.reshape(-1, 3), axis=0).tolist()}


def drag(page: Any, selector: str, *places: tuple[float, float]) -> None:
    """Press the mouse at the first place of an element, in fractions of its size, and move to the others."""
    box = page.locator(selector).bounding_box()
    for number, (column, row) in enumerate(places):
        page.mouse.move(box["x"] + column * box["width"], box["y"] + row * box["height"])
        if number == 0:
            page.mouse.down()
    page.mouse.up()


def pack(said: dict[str, Any]) -> str:
    """Return the part of a link that says what is played."""
    return base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")


def unpack(link: str) -> dict[str, Any]:
    """Return what a link says."""
    said = link.partition("#")[2]
    return json.loads(base64.urlsafe_b64decode(said + "=" * (-len(said) % 4)))


def begin(page: Any, address: str) -> None:
    page.goto(address)
    page.click("#tiles button >> nth=0")
    page.wait_for_selector('#screen[data-round="0"]')


def test_every_control_of_the_page_acts_as_in_python(
    exported: Callable[[Path], Path], make_model: Callable[..., WorldModel], page: Any, tmp_path: Path
) -> None:
    model = make_model(seed=2, **KINDS["all kinds of action"]).bfloat16().float()
    folder = model.save_pretrained(tmp_path / "model")
    start = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(start).save(tmp_path / "start.png")
    with served(exported(folder)) as address:
        page.goto(address)
        page.set_input_files("#file", tmp_path / "start.png")
        page.wait_for_selector('#screen[data-round="0"]')
        drag(page, "#screen", (0.25, 0.5), (0.75, 0.25))
        page.wait_for_selector('#screen[data-round="1"]')
        page.click('#buttons button[title="turn left"]')
        page.wait_for_selector('#screen[data-round="2"]')
        page.get_by_label("push_right").fill("12")
        page.get_by_label("push_down").fill("-6")
        page.click("text=Send numbers")
        page.wait_for_selector('#screen[data-round="3"]')
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector('#screen[data-round="4"]')
        page.fill("#words", "go on")
        page.keyboard.press("Enter")
        page.wait_for_selector('#screen[data-round="5"]')
        seen = picture(page)
        page.click("#share")
        said = unpack(page.input_value("#address"))
        for kind, value in {"camera": {"data": {"translation": [0, 9, 0]}}, "vector": [0, 25]}.items():
            page.goto("about:blank")
            page.goto(f"{address}#{pack(said | {'actions': [{kind: value}]})}")
            page.wait_for_selector("#alert:not(:empty)")
            assert kind in page.inner_text("#alert")
    actions = said["actions"]
    mouse = actions[0].pop("mouse")
    assert mouse == pytest.approx([0.25, 0.5, 0.5, -0.25], abs=0.02)
    vector = {"vector": [12, -6]}
    assert actions[1:] == [TURN, vector, {"keys": ["left"]}, {"text": "go on"}]
    session = WorldModel.from_pretrained(folder).session(seed=0, num_inference_steps=0)
    session.reset(start)
    for action in [{"mouse": mouse}, *actions[1:]]:
        session.step(action)
    assert farthest([seen], [session.frames[-1]]) <= MOST


def test_the_page_undoes_forks_saves_and_shares(exported: Callable[[str], Path], page: Any) -> None:
    with served(exported("minigrid-doorkey")) as address:
        begin(page, address)
        start = picture(page)
        play(page, "ArrowUp", "ArrowLeft")
        turned = picture(page)
        assert not np.array_equal(turned, start)

        page.click("#fork")
        page.click("#undo")
        page.keyboard.press("Backspace")
        page.wait_for_selector('#screen[data-round="0"]')
        assert np.array_equal(picture(page), start)
        play(page, "ArrowUp", "ArrowRight")
        assert not np.array_equal(picture(page), turned), "another action, another picture"
        page.click("#moments button")
        assert np.array_equal(picture(page), turned)

        with page.expect_download() as saved:
            page.click("#png")
        large = np.asarray(Image.open(saved.value.path()).convert("RGB"))
        factor = large.shape[0] // turned.shape[0]
        assert np.array_equal(large, turned.repeat(factor, 0).repeat(factor, 1))
        with page.expect_download() as saved:
            page.click("#gif")
        assert Image.open(saved.value.path()).n_frames == 3

        page.click("#share")
        link = page.input_value("#address")
        page.goto("about:blank")
        page.goto(link)
        page.wait_for_selector('#screen[data-round="2"]')
        assert np.array_equal(picture(page), turned), "a link gives the same film"


LINKS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": "0" * 16}, "another model"),
    "an unknown key": ({"actions": [{"keys": ["forward"]}, {"keys": ["fly"]}]}, "fly"),
    "words": ({"actions": [{"text": "jump"}]}, "text"),
    "keys as a string": ({"actions": [{"keys": "forward"}]}, "keys"),
    "a number as an action": ({"actions": [7]}, "action"),
    "too many actions at once": ({"actions": [{"chunk": [{}, {}]}]}, "2"),
    "no actions": ({"actions": "forward"}, "damaged"),
    "a seed below zero": ({"seed": -1}, "damaged"),
    "a seed as a string": ({"seed": "1"}, "damaged"),
    "an unknown picture": ({"start": 99}, "picture"),
    "a picture of another server": ({"start": {"png": "https://example.org/picture.png"}}, "picture"),
    "a text where the world takes none": ({"start": {"text": "a ball"}}, "text"),
    "no start": ({"start": None}, "picture"),
}


@pytest.mark.parametrize("kind", LINKS)
def test_links_that_do_not_fit_are_refused(kind: str, exported: Callable[[str], Path], page: Any) -> None:
    folder = exported("minigrid-doorkey")
    changed, named = LINKS[kind]
    fingerprint = json.loads((folder / "web.json").read_text())["fingerprint"]
    said = {"model": fingerprint, "start": 0, "seed": 0, "actions": []} | changed
    requests: list[str] = []
    page.on("request", lambda sent: requests.append(sent.url))
    with served(folder) as address:
        page.goto(f"{address}#{pack(said)}")
        page.wait_for_selector("#alert:not(:empty)")
        assert named in page.inner_text("#alert")
        assert page.get_attribute("#screen", "data-round") is None, "nothing was played"
        assert all(url.startswith((address, "data:", "blob:")) for url in requests)


def test_a_damaged_link_is_refused(exported: Callable[[str], Path], page: Any) -> None:
    with served(exported("minigrid-doorkey")) as address:
        page.goto(f"{address}#%%%")
        page.wait_for_selector("#alert:not(:empty)")
        assert "damaged" in page.inner_text("#alert")


def test_an_upload_stays_in_the_browser(exported: Callable[[str], Path], page: Any, tmp_path: Path) -> None:
    requests: list[str] = []
    upload = tmp_path / "upload.png"
    Image.fromarray(np.full((200, 300, 3), 90, np.uint8)).save(upload)
    with served(exported("minigrid-doorkey")) as address:
        page.goto(address)
        page.wait_for_selector("#tiles button")
        page.wait_for_selector("#loading", state="hidden")
        page.on("request", lambda sent: requests.append(sent.url))
        page.set_input_files("#file", upload)
        page.wait_for_selector('#screen[data-round="0"]')
        assert np.array_equal(picture(page), np.full((48, 48, 3), 90))
        assert [url for url in requests if not url.startswith(("data:", "blob:"))] == []


@pytest.mark.parametrize("name", ["minigrid-doorkey", "shapes-tiny"])
def test_pictures_have_the_observation_score_of_python(
    name: str, exported: Callable[[str], Path], page: Any
) -> None:
    model = WorldModel.from_pretrained(name)
    start = np.asarray(start_images(model)[0].image)
    noise = np.random.default_rng(0).integers(0, 256, start.shape, dtype=np.uint8)
    with served(exported(name)) as address:
        for image in (start, noise):
            session = model.session(num_inference_steps=0)
            session.reset(image)
            truth = session.observation_score()
            page.goto(address)
            asked = {"start": {"rgba": rgba(image)}, "seed": 0, "actions": [], "foreign": True}
            assert page.evaluate(PLAY, asked) == pytest.approx(truth, rel=0.01, abs=0.01)


def test_the_page_says_that_it_does_not_know_a_picture(
    exported: Callable[[str], Path], page: Any, tmp_path: Path
) -> None:
    upload = tmp_path / "upload.png"
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    for image, unknown in (
        (noise, True),
        (start_images(WorldModel.from_pretrained("minigrid-doorkey"))[0].image, False),
    ):
        Image.fromarray(image).save(upload)
        with served(exported("minigrid-doorkey")) as address:
            page.goto(address)
            page.set_input_files("#file", upload)
            page.wait_for_selector('#screen[data-round="0"]')
            assert ("does not know that picture" in page.inner_text("#said")) == unknown


ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


def test_an_isolated_page_plays_on_several_threads(exported: Callable[[str], Path], page: Any) -> None:
    asked, truth = film("minigrid-doorkey")
    with served(exported("minigrid-doorkey"), ISOLATED) as address:
        page.goto(address)
        assert page.evaluate("crossOriginIsolated")
        rounds = page.evaluate(PLAY, asked | {"threads": 2})
    assert farthest(decoded(rounds, (48, 48)), [each.frames for each in truth]) <= MOST


def test_the_second_visit_is_isolated(exported: Callable[[str], Path], page: Any) -> None:
    with served(exported("minigrid-doorkey")) as address:
        page.goto(address)
        assert not page.evaluate("crossOriginIsolated")
        page.evaluate("navigator.serviceWorker.ready.then(() => null)")
        begin(page, address)
        assert page.evaluate("crossOriginIsolated")
        before = picture(page)
        play(page, "ArrowUp", "ArrowRight")
        assert not np.array_equal(picture(page), before)


def test_a_browser_without_simd_is_told(exported: Callable[[str], Path], page: Any) -> None:
    page.add_init_script("WebAssembly.validate = () => false")
    with served(exported("minigrid-doorkey")) as address:
        page.goto(address)
        page.wait_for_selector("#alert:not(:empty)")
        assert "SIMD" in page.inner_text("#alert")


def test_a_truncated_folder_is_named(exported: Callable[[str], Path], page: Any, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    subprocess.run(["cp", "-r", str(exported("minigrid-doorkey")), str(folder)], check=True)
    (folder / "round.onnx").write_bytes((folder / "round.onnx").read_bytes()[:1000])
    with served(folder) as address:
        page.goto(address)
        page.wait_for_selector("#alert:not(:empty)")
        assert "round.onnx" in page.inner_text("#alert")


def test_one_file_plays_from_a_disk(exported: Callable[[str], Path], page: Any, tmp_path: Path) -> None:
    exported("minigrid-doorkey")  # skips where the libraries are not here
    file = tmp_path / "doorkey.html"
    assert export("minigrid-doorkey", file, "--single-file").returncode == 0
    begin(page, file.as_uri())
    before = picture(page)
    play(page, "ArrowUp", "ArrowRight")
    assert not np.array_equal(picture(page), before)
    page.click("#share")
    assert page.input_value("#address").startswith("file://")


def test_the_page_fits_a_phone(exported: Callable[[str], Path], browser: Any) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 3}
    context = browser.new_context(**phone, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    with served(exported("minigrid-doorkey")) as address:
        begin(page, address)
        shown = np.asarray(Image.open(BytesIO(page.locator("#screen").screenshot())).convert("RGB"))
        inside = shown[60:-60, 60:-60]  # its corners are round
        assert colours(inside) <= colours(picture(page)), "enlarged pixels stay sharp"
        page.tap('#pad [data-key="forward"]')
        page.wait_for_selector('#screen[data-round="1"]')
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("#pad button").first.bounding_box()["height"] >= 44
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: str, exported: Callable[[str], Path], page: Any) -> None:
    pytest.importorskip("axe_playwright_python")
    page.emulate_media(color_scheme=scheme)
    with served(exported("shapes-tiny")) as address:
        page.goto(address)
        page.wait_for_selector("#loading", state="hidden")
        assert findings(page) == []
        page.click("#tiles button >> nth=0")
        page.wait_for_selector('#screen[data-round="0"]')
        play(page, "j")
        page.click("#fork")
        page.click("#share")
        assert findings(page) == []


def test_the_first_page_of_the_docs_plays_a_world(
    exported: Callable[[str], Path], page: Any, tmp_path: Path
) -> None:
    config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed: openworldmodel[docs]")
    build = pytest.importorskip("mkdocs.commands.build")
    pages, site = tmp_path / "docs", tmp_path / "site"
    shutil.copytree(ROOT / "docs" / "assets", pages / "assets")
    shutil.copy(ROOT / "docs" / "index.md", pages)
    # The first page alone: the others take minutes.
    alone = {"docs_dir": str(pages), "site_dir": str(site), "nav": None, "hooks": [], "plugins": []}
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), strict=False, **alone))
    button = page.locator('[data-play="play/minigrid-doorkey/"]')
    with served(site) as address:
        with page.expect_response("**/minigrid-doorkey/web.json"):
            page.goto(address)
        assert button.is_hidden(), "there is no world"
        shutil.copytree(exported("minigrid-doorkey"), site / "play" / "minigrid-doorkey")
        page.goto(address)
        button.click()
        frame = page.frame_locator(".wm-play iframe")
        frame.locator("#tiles button").first.click()
        frame.locator('#screen[data-round="0"]').wait_for()
        frame.locator('#pad [data-key="forward"]').click()
        frame.locator('#screen[data-round="1"]').wait_for()
        assert frame.locator("h1").is_hidden()


def test_a_model_whose_parts_cannot_go_is_refused(
    make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    model = make_model(state=StateConfig(width=32, num_layers=1, num_heads=2, merge=2))
    folder = model.save_pretrained(tmp_path / "model")
    result = export(folder, tmp_path / "web")
    assert result.returncode == 2
    assert "state.merge" in result.stderr
    assert not (tmp_path / "web").exists()
    assert not re.search("Traceback", result.stderr)
