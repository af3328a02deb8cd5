"""The demo in a browser, at the sizes of a desktop and a phone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
from accessibility import findings

import worldmodel.demo
from worldmodel.actions import Action, Pose
from worldmodel.config import ActionConfig
from worldmodel.models.world_model import WorldModel

pytestmark = pytest.mark.slow
PATIENCE_MS = 60_000
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}


@pytest.fixture(params=SIZES)
def page(request: pytest.FixtureRequest, browser: Any, demo: str) -> Iterator[Any]:
    """The page of a new visitor; errors in the page and requests to other hosts fail the test."""
    width, height = SIZES[request.param]
    context = browser.new_context(
        viewport={"width": width, "height": height}, has_touch=request.param == "phone", accept_downloads=True
    )
    page, errors, external = context.new_page(), [], []
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda sent: external.append(sent.url) if not local(sent.url) else None)
    page.goto(demo)
    page.wait_for_selector(".wm-tile")
    yield page
    context.close()
    assert errors == []
    assert external == [], "the page sends requests to other hosts"


def local(url: str) -> bool:
    return url.startswith(("data:", "blob:", "http://127.0.0.1", "ws://127.0.0.1"))


def start(page: Any) -> None:
    page.click(".wm-tile >> nth=0")
    page.wait_for_selector("#wm-stage img")
    assert page.locator("#wm-start").is_hidden()


def say(page: Any, action: str) -> None:
    page.fill("#wm-action textarea, #wm-action input", action)
    page.click("#wm-act")


def stands_at(page: Any, index: int, count: int) -> None:
    """Wait until the timeline has `count` moments and `index` is the current one."""
    page.wait_for_selector(f'.wm-cell.now[data-index="{index}"]')
    page.wait_for_function(f"document.querySelectorAll('.wm-cell').length === {count}")


def plays(page: Any, selector: str = "#wm-stage") -> None:
    """Wait until the clip was played to its end, at a size of 384 pixels or more."""
    clip = f"document.querySelector('{selector} video')"
    page.wait_for_function(f"{clip} && {clip}.ended")
    assert page.evaluate(f"{clip}.videoWidth") >= 384
    assert page.evaluate(f"{clip}.error") is None


def note(page: Any) -> str:
    shown = page.locator(".wm-note:visible").last
    shown.wait_for()
    return shown.inner_text()


def children_of(pid: int) -> list[str]:
    """Return the ids of a process's children, whichever thread started them."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for file in files for child in file.read_text().split()]


def covers(page: Any, selector: str, other: str) -> bool:
    """Whether the last element of one selector lies over that of another."""
    first, second = (page.locator(each).last.bounding_box() for each in (selector, other))
    return all(
        first[start] < second[start] + second[length] and second[start] < first[start] + first[length]
        for start, length in (("x", "width"), ("y", "height"))
    )


def fits(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_steer_undo_fork_compare_and_save(page: Any, tmp_path: Path, server: str) -> None:
    assert page.locator(".wm-tile").count() == 5
    assert fits(page)
    start(page)
    say(page, "the red ball moves right")
    stands_at(page, 1, 2)
    plays(page)
    assert page.input_value("#wm-action textarea, #wm-action input") == ""
    chip = page.locator(".wm-chip").first
    action = chip.get_attribute("data-act")
    chip.click()
    stands_at(page, 2, 3)
    plays(page)
    assert page.locator("#wm-stage figcaption span").first.inner_text() == action
    assert re.match(r"reward -?\d+\.\d\d", page.inner_text("#wm-stage .wm-outcome"))
    assert fits(page)

    page.click("#wm-describe")
    page.wait_for_selector(".wm-answer p")
    page.click("#wm-undo")
    stands_at(page, 1, 3)
    page.click('.wm-cell[data-index="2"]')
    stands_at(page, 2, 3)
    page.click('.wm-cell[data-index="0"]')
    stands_at(page, 0, 3)
    assert page.locator("#wm-undo").is_disabled()
    page.click('.wm-chip[data-kind="wait"]')
    stands_at(page, 1, 2)

    page.click("#wm-fork")
    page.wait_for_selector('.wm-branches button[aria-pressed="true"] >> text=Fork 1')
    page.click("#wm-compare")
    page.fill("#wm-first textarea, #wm-first input", "the red ball jumps")
    page.fill("#wm-second textarea, #wm-second input", "the blue box vanishes")
    page.click("#wm-both")
    for side in ("a", "b"):
        plays(page, f"#wm-future-{side}")
    assert page.locator("#wm-main").is_hidden()
    assert fits(page)
    page.screenshot(path=tmp_path / "futures.png", full_page=True)
    page.click("#wm-choose-b")
    stands_at(page, 2, 3)
    assert page.inner_text("#wm-stage figcaption span") == "the blue box vanishes"
    # The chosen world has no snapshot of this moment, so its actions are replayed.
    page.click('.wm-cell[data-index="1"]')
    stands_at(page, 1, 3)
    page.click(".wm-branches button >> nth=0")
    stands_at(page, 1, 2)

    for button, head, name in (
        ("mp4", b"ftyp", "rollout.mp4"),
        ("gif", b"GIF89a", "rollout.gif"),
        ("data", b"PK", "played.zip"),
    ):
        with page.expect_download() as download:
            page.click(f"#wm-{button}")
        assert download.value.suggested_filename == name
        assert head in Path(download.value.path()).read_bytes()[:12]
    page.screenshot(path=tmp_path / "world.png", full_page=True)
    page.click("#wm-new")
    page.wait_for_selector(".wm-tile")
    assert httpx.get(f"{server}/v1/worlds", trust_env=False).json()["data"] == []


def test_presses_made_meanwhile_are_played_and_a_reload_keeps_the_world(page: Any) -> None:
    start(page)
    # Rounds of the tiny model are short, so what was on the page meanwhile is recorded.
    page.evaluate(
        """() => {
          window.seen = {};
          const look = () => {
            for (const name of ["progress", "waiting li", "running button", "running i"]) {
              if (document.querySelector(`#wm-status .wm-${name}, #wm-status .wm-running ${name}`))
                window.seen[name] = true;
            }
          };
          new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
        }"""
    )
    for index in range(3):
        page.locator(".wm-chip").nth(index).dispatch_event("click")
    stands_at(page, 3, 4)
    assert page.evaluate("Object.keys(window.seen).length") == 4, page.evaluate("window.seen")
    if page.viewport_size["width"] > 641:  # on a phone, suggestions wrap
        rows = page.locator(".wm-target > span:last-child")
        heights = rows.evaluate_all("all => all.map(row => row.getBoundingClientRect().height)")
        assert max(heights) < 45, "a suggestion falls alone into a second line"
    page.locator(".wm-chip").last.scroll_into_view_if_needed()
    box = page.locator(".wm-frame").bounding_box()
    if page.viewport_size["width"] < 641:  # the picture stays in view; on a desktop there is room for both
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= page.viewport_size["height"]
    page.reload()
    stands_at(page, 3, 4)
    say(page, "the red ball jumps")
    stands_at(page, 4, 5)
    page.click("#wm-new")
    page.wait_for_selector(".wm-tile")
    page.reload()
    page.wait_for_selector(".wm-tile")
    assert page.locator("#wm-play").is_hidden()


def test_live_tab(page: Any) -> None:
    page.get_by_role("tab", name="Play live").click()
    frame = page.frame_locator("#wm-live iframe")
    frame.locator("#tiles button").first.click()
    frame.locator("body[data-live]").wait_for()
    assert frame.locator("h1").is_hidden()
    key = frame.locator("#pad button").first
    key.tap() if page.viewport_size["width"] < 641 else key.click()
    frame.locator("#log li").first.wait_for()
    canvas = frame.locator("#screen").bounding_box()
    assert canvas["y"] >= 0
    assert frame.locator("#screen").evaluate("canvas => canvas.width") == 512
    assert fits(page)
    frame.locator("#stop").click()
    frame.locator("#link[data-state=ended]").wait_for()


def test_axe_finds_nothing(page: Any, server: str, tmp_path: Path) -> None:
    pytest.importorskip("axe_playwright_python")
    assert findings(page) == []
    start(page)
    page.locator(".wm-chip").first.click()
    stands_at(page, 1, 2)
    page.click("#wm-fork")
    page.wait_for_selector('.wm-branches button[aria-pressed="true"] >> text=Fork 1')
    assert findings(page) == []
    page.screenshot(path=tmp_path / "steer.png", full_page=True)
    page.goto(f"{server}/play")
    page.wait_for_selector("#tiles button")
    assert findings(page) == []
    page.locator("#tiles button").first.click()
    page.wait_for_selector("body[data-live]")
    page.locator("#pad button").first.click()
    page.locator("#log li").first.wait_for()
    page.click("#fork")
    page.locator("#moments button").wait_for()
    assert findings(page) == []
    page.screenshot(path=tmp_path / "live.png", full_page=True)


def test_the_focus_stays_with_what_is_steered(page: Any) -> None:
    focused = "document.activeElement"
    page.locator(".wm-tile").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"{focused}.classList.contains('wm-stage')")
    chip = page.locator('.wm-chip[data-kind="wait"]')
    chip.focus()
    page.keyboard.press("Enter")
    stands_at(page, 1, 2)
    page.wait_for_function(f"{focused}.dataset.kind === 'wait'")
    page.keyboard.press("Enter")
    stands_at(page, 2, 3)


def test_a_world_moves_between_the_tabs(page: Any) -> None:
    start(page)
    page.locator(".wm-chip").first.click()
    stands_at(page, 1, 2)
    frame = page.frame_locator("#wm-live iframe")
    for number in (1, 2):
        page.click("#wm-go-live")
        frame.locator("body[data-live]").wait_for()
        frame.locator("#round:text-matches('[1-9]')").wait_for()
        frame.locator("#pad button").first.click()
        frame.locator("#log li").first.wait_for()
        frame.locator("#fork").click()
        frame.locator("#moments button").wait_for()
        frame.locator("#steer").click()
        page.locator(f'.wm-branches button[aria-pressed="true"]:has-text("Live {number}")').wait_for()
        assert page.locator("#wm-live").is_hidden()
        at = int(page.inner_text("#wm-stage figcaption b").removeprefix("Round "))
        assert at > number, "it goes on where it stood"
        page.locator(".wm-chip").first.click()
        stands_at(page, 1, 2)
        assert page.inner_text("#wm-stage figcaption b") == f"Round {at + 1}"
    page.click(".wm-branches button >> nth=0")
    page.wait_for_selector('.wm-branches button[aria-pressed="true"]:has-text("Main")')
    assert page.inner_text("#wm-stage figcaption b") == "Round 1"


def test_the_play_page_offers_the_things_that_are_there(
    browser: Any, make_model: Callable[..., WorldModel], serve: Callable[..., str]
) -> None:
    action = ActionConfig(keys=("red", "blue", "left", "jump"), text={"max_tokens": 64})
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)

    def describe(route: Any) -> None:
        """Pass all messages on; the random model's description becomes one of a red ball."""
        server = route.connect_to_server()

        def to_page(message: str | bytes) -> None:
            if isinstance(message, str) and (event := json.loads(message))["type"] == "session.described":
                message = json.dumps(event | {"text": "a red ball"})
            route.send(message)

        server.on_message(to_page)

    page.route_web_socket(re.compile("realtime"), describe)
    try:
        page.goto(f"{serve(make_model(action=action))}/play")
        page.fill("#text", "a red ball")
        page.click("#go")
        page.locator("body[data-live]").wait_for()
        page.locator('#things [data-key="blue"]').wait_for(state="hidden")
        red = page.locator('#things [data-key="red"]')
        assert red.is_visible()
        assert red.get_attribute("aria-checked") == "true"
    finally:
        page.close()


def record_actions(page: Any) -> list[Any]:
    """Return a list to which the actions that the page sends are appended."""
    sent = []

    def record(route: Any) -> None:
        server = route.connect_to_server()

        def to_server(message: str | bytes) -> None:
            event = json.loads(message) if isinstance(message, str) else {"type": ""}
            if event["type"] == "session.interaction":
                sent.append(event["interaction"]["event"]["action"])
            server.send(message)

        route.on_message(to_server)

    page.route_web_socket(re.compile("realtime"), record)
    return sent


def test_the_play_page_takes_mouse_camera_and_vectors(
    browser: Any, make_model: Callable[..., WorldModel], serve: Callable[..., str]
) -> None:
    action = ActionConfig(text=False, mouse=True, camera=True, vector={"low": (0, -1), "high": (4, 1)})
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    sent = record_actions(page)
    try:
        page.goto(f"{serve(make_model(action=action))}/play")
        page.set_input_files("#file", Path(worldmodel.demo.__file__).with_name("first_frame.png"))
        page.click("#go")
        page.locator("body[data-live]").wait_for()
        assert "Drag" in page.locator("#hint").inner_text()
        box = page.locator("#screen").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + box["width"] / 4, y - box["height"] / 8)
        page.mouse.up()
        page.get_by_role("button", name="turn right").click()
        page.locator("#numbers input").first.fill("3")
        page.get_by_role("button", name="Send numbers").click()
        page.wait_for_function("document.querySelectorAll('#log li').length >= 3")
        *moves, turn, vector = sent
        assert np.sum([each["mouse"] for each in moves], axis=0) == pytest.approx([0.25, -0.125], abs=0.01)
        assert vector == {"vector": [3, 0]}
        motion = Action.of(turn).camera
        assert motion is not None and motion.mode == "velocity"
        ahead = Pose((0, 0, 0), motion.pose.rotation).then(Pose((0, 0, 1))).translation
        assert ahead == pytest.approx(
            (np.sin(np.pi / 18), 0, np.cos(np.pi / 18))
        )  # to the right by 10 degrees
        assert page.locator("#alert").inner_text() == ""
    finally:
        page.close()


def test_the_play_page_takes_gamepads_records_clips_and_starts_again(
    browser: Any, make_model: Callable[..., WorldModel], serve: Callable[..., str], tmp_path: Path
) -> None:
    action = ActionConfig(text=False, keys=("left", "jump", "duck"))
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    sent = record_actions(page)
    held = "button => pads[0].buttons[button] = { pressed: true }"
    free = "button => pads[0].buttons[button] = { pressed: false }"
    try:
        page.add_init_script(
            "globalThis.pads = [{ connected: true, axes: [0, 0], buttons: [] }];"
            "navigator.getGamepads = () => pads;"
        )
        page.goto(f"{serve(make_model(action=action))}/play")
        page.set_input_files("#file", Path(worldmodel.demo.__file__).with_name("first_frame.png"))
        page.click("#go")
        page.locator("#screen[data-frame]").wait_for()
        page.click("#record")
        for button in (14, 1):  # left of the directions, and the second verb
            page.evaluate(held, button)
            page.wait_for_timeout(300)
            page.evaluate(free, button)
            page.wait_for_timeout(100)
        page.evaluate("pads[0].axes = [-0.9, 0.1]")
        page.locator("#log li").nth(2).wait_for()
        assert sent == [{"keys": ["left"]}, {"keys": ["duck"]}, {"keys": ["left"]}]
        with page.expect_download() as download:
            page.click("#record")
        clip = tmp_path / download.value.suggested_filename
        download.value.save_as(clip)
        assert clip.suffix in (".webm", ".mp4")
        with av.open(str(clip)) as film:
            frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        assert frames[0].shape[:2] == (512, 512)
        assert len(frames) > 3
        assert frames[-1].std() > 0
        page.evaluate("pads[0].axes = [0, 0]")
        page.click("#again")
        page.locator("#log:not(:has(li))").wait_for(state="attached")
        page.locator("body[data-live] #screen[data-frame]").wait_for()
        page.evaluate(held, 0)
        page.locator("#log li").wait_for()
        assert sent[-1] == {"keys": ["jump"]}
        assert page.locator("#alert").inner_text() == ""
    finally:
        page.close()


def test_the_play_page_undoes_round_by_round(
    browser: Any, make_model: Callable[..., WorldModel], serve: Callable[..., str]
) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    try:
        page.goto(f"{serve(make_model(action=ActionConfig(text=False, keys=('left',))))}/play")
        page.set_input_files("#file", Path(worldmodel.demo.__file__).with_name("first_frame.png"))
        assert page.locator("#undo").is_disabled()
        page.click("summary")
        page.check("#paused")
        page.click("#go")

        def shows(round_: int, frame: int) -> None:
            page.locator(f"#round:text-is('{round_}')").wait_for()
            # Asked from here: the page's policy lets no script of others wait in it.
            until = time.monotonic() + PATIENCE_MS / 1000
            while not page.evaluate("Number(document.querySelector('#screen').dataset.frame)") >= frame:
                assert time.monotonic() < until, f"no frame {frame}"
                page.wait_for_timeout(50)

        shows(0, 0)
        for round_ in (1, 2):
            page.keyboard.press("ArrowLeft")
            shows(round_, 8 * round_)
        page.click("#undo")
        shows(1, 17)
        page.keyboard.press("Backspace")
        shows(0, 25)
        assert page.locator("#alert").inner_text() == ""
        page.click("#undo")
        page.locator("#alert:text('nothing to undo')").wait_for()
        page.click("#run")
        page.locator("#round:text-matches('[2-9]')").wait_for()
        page.click("#undo")  # what runs is paused, or the round would be played again
        page.locator("#run:text-is('Run')").wait_for()
        assert page.locator("#alert").inner_text() == ""
    finally:
        page.close()


@pytest.mark.parametrize("pace", ["realtime", "on_action"])
def test_the_play_page_samples_the_actions_of_a_round(
    browser: Any, make_model: Callable[..., WorldModel], serve: Callable[..., str], pace: Any
) -> None:
    """In a round of four frames, each half a second long; the world is paused, then runs."""
    action = ActionConfig(text=False, keys=("left", "jump"), mouse=True, vector=1, per_round=4)
    left, jump = {"keys": ["left"]}, {"keys": ["jump"]}
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    sent = record_actions(page)

    def until(action: dict[str, Any], times: int = 1) -> list[dict[str, Any]]:
        """Wait for a list in which an action occurs so often, and return the actions of all lists."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not any(each["chunk"].count(action) >= times for each in sent):
            assert time.monotonic() < deadline, sent
            page.wait_for_timeout(50)
        assert {len(each["chunk"]) for each in sent} == {4}
        return [part for each in sent for part in each["chunk"]]

    try:
        page.clock.install()
        page.goto(f"{serve(make_model(action=action, chunk_frames=4, fps=2, pace=pace))}/play")
        page.set_input_files("#file", Path(worldmodel.demo.__file__).with_name("first_frame.png"))
        page.click("summary")
        page.check("#paused")
        page.click("#go")
        page.locator("#screen[data-frame]").wait_for()
        page.clock.pause_at("2100-01-01")
        page.keyboard.down("ArrowLeft")
        page.clock.run_for(100)
        page.keyboard.up("ArrowLeft")
        page.keyboard.press("j")
        page.clock.run_for(1600)
        # A model that was trained with an action at all times gets one.
        later = jump if pace == "on_action" else {}
        assert until(jump) == [left, jump, later, later]
        page.clock.resume()
        page.locator('#verbs [data-key="jump"]').hover()
        page.mouse.down()
        until(jump, times=4)
        page.keyboard.down("ArrowLeft")
        until({"keys": ["jump", "left"]})
        page.mouse.up()
        page.keyboard.up("ArrowLeft")
        page.click("#run")
        page.locator("#numbers input").press("ArrowRight")
        box = page.locator("#screen").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
        page.mouse.up()
        page.keyboard.down("ArrowLeft")
        later = until(left, times=4)
        page.keyboard.up("ArrowLeft")
        assert [each["vector"] for each in later if "vector" in each] == [[0.05]]
        assert sum(each["mouse"][0] for each in later if "mouse" in each) == pytest.approx(-0.25, abs=0.01)
        assert page.locator("#alert").inner_text() == ""
    finally:
        page.close()


def test_errors_are_warnings_and_change_nothing(page: Any, tmp_path: Path) -> None:
    page.click("#wm-imagine")
    assert "Describe the scene" in note(page)
    page.reload()
    page.wait_for_selector(".wm-tile")
    (tmp_path / "notes.png").write_text("not an image")
    page.set_input_files("#wm-upload input[type=file]", tmp_path / "notes.png")
    assert "unknown kind" in note(page)
    page.wait_for_selector("#wm-upload input[type=file]", state="attached")  # the file has left the box
    assert "notes.png" not in page.inner_text("#wm-upload")
    assert page.locator("#wm-play").is_hidden()
    page.reload()
    page.wait_for_selector(".wm-tile")
    start(page)
    say(page, "<img src=x onerror=alert(1)> ${1+1} {{value}}")
    stands_at(page, 1, 2)
    assert page.inner_text("#wm-stage figcaption span") == "<img src=x onerror=alert(1)> ${1+1} {{value}}"
    say(page, "   ")
    assert "Describe the action" in note(page)
    for covered in ("#wm-act", "#wm-action", "#wm-stage .wm-frame"):
        assert not covers(page, ".wm-note:visible", covered), covered
    stands_at(page, 1, 2)
    html = page.content()
    assert "/tmp/" not in html
    assert str(Path.cwd()) not in html


def test_start_from_text_and_from_an_upload(page: Any) -> None:
    assert page.locator(".wm-intro li").count() == 3
    seed = page.locator("#wm-seed input")
    assert seed.is_enabled()
    assert page.locator("#wm-seed label").evaluate("it => getComputedStyle(it).backgroundColor") == (
        "rgba(0, 0, 0, 0)"
    )
    page.fill("#wm-text textarea", "night background, a small red ball at the left")
    page.click("#wm-imagine")
    page.wait_for_selector("#wm-stage .wm-frame > *")
    page.click("#wm-new")
    page.wait_for_selector(".wm-tile")
    image = Path(__file__).parents[2] / "demo" / "first_frame.png"
    page.set_input_files("#wm-upload input[type=file]", image)
    page.wait_for_selector("#wm-stage img")
    # Suggestions name the objects of the image.
    assert "red ball" in page.inner_text(".wm-palette")


def test_command_starts_and_stops_its_own_server(model_folder: Path) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed: openworldmodel[demo]")
    command = [sys.executable, "-P", "-m", "worldmodel", "demo", str(model_folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}
    ) as demo:
        assert demo.stdout is not None
        try:
            line = next(line for line in demo.stdout if line.startswith("Open "))
            address = re.search(r"http://127\.0\.0\.1:\d+/?", line)
            assert address is not None, line
            answer = httpx.get(address[0], trust_env=False)
            assert answer.status_code == 200
            play = re.search(r"http://127\.0\.0\.1:\d+", answer.text.replace(address[0].rstrip("/"), ""))
            assert play is None, "the address of the server is sent only when the tab is opened"
            (server,) = children_of(demo.pid)
            os.kill(int(server), signal.SIGKILL)
            assert any("started again" in line for line in demo.stdout)
            deadline = time.monotonic() + 30
            while server in children_of(demo.pid) or not children_of(demo.pid):
                assert time.monotonic() < deadline, "the server was not started again"
                time.sleep(0.1)
        finally:
            children = children_of(demo.pid)
            demo.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                demo.wait(90)
            demo.kill()  # leaving the block waits without a timeout
        assert demo.returncode == 130
        assert children
        assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_command_errors(tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed: openworldmodel[demo]")
    for given, named in (
        ([str(tmp_path)], "error: "),
        (["tiny", "--server", "http://127.0.0.1:9"], "--server"),
        (["--server", "nowhere"], "nowhere"),
        (["--server", "http://127.0.0.1:9", "--device", "cpu"], "--device"),
        (["shapes-tiny", "--device", "abacus"], "abacus"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "worldmodel", "demo", *given],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2
        assert named in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("size", SIZES)
def test_the_tab_of_a_flow_shows_its_clips(browser: Any, tmp_path: Path, size: str) -> None:
    from flow_stages import flow_config, write_table

    from worldmodel.demo import app
    from worldmodel.demo import page as pages
    from worldmodel.demo.flow_reader import FlowReader
    from worldmodel.flow.work.run import run_flow

    (tmp_path / "files").mkdir()
    stages = {"read": {}, "measure": {"settings": {"least": 106}}}
    config = flow_config(tmp_path / "flow", write_table(tmp_path / "files", 70), stages)
    run_flow(config)
    width, height = SIZES[size]
    blocks = app.build("http://127.0.0.1:9", world="shapes", flow=FlowReader(config))
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(PATIENCE_MS)
    try:
        page.goto(pages.launch(blocks, None))
        page.get_by_role("tab", name="Data").click()
        clips = "document.querySelectorAll('.wm-clip').length"
        page.wait_for_function(f"{clips} === 64")
        assert fits(page)
        assert page.locator("#wm-previous").is_disabled()
        page.click("#wm-next")
        page.wait_for_function(f"{clips} === 6")
        page.click("#wm-previous")
        page.wait_for_function(f"{clips} === 64")
        page.click("#wm-stage-name input")
        page.get_by_role("option", name="measure").click()
        page.wait_for_function(f"{clips} === 6")
        assert "103 bytes, below 106" in page.inner_text("#wm-clips")
        assert "6 dropped" in page.inner_text("#wm-counts")
    finally:
        page.close()
        blocks.close(verbose=False)
