"""Draw the pictures of shipped worlds in `docs/assets/`.

    python docs/pictures.py

`worlds/NAME.png`: five rounds of each shipped world above their actions. `worlds.gif`: four worlds played
at once, each above the action that steers it. `chance.png`: the possible futures that the state of shapes-
chance foresees, beside the true ones. It needs MiniGrid (`pip install ".[gym]" minigrid`), whose first
frame and actions one world takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from worldmodel import Action, WorldModel
from worldmodel.actions import Camera, Pose
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.settings import EnvironmentSettings
from worldmodel.shapes.evaluation.cases import chance_cases

ROOT = Path(__file__).parent.parent
SIDE, GAP, TITLE, CAPTION = 192, 12, 22, 40
"""Sizes in pixels: a panel, the space around it, the line above it and the two lines below."""
ROUNDS, FRAMES = 8, 4
"""Rounds of the animation, and pictures in each: every second frame of a round of eight."""
BACKGROUND, TEXT, FAINT = (255, 255, 255), (32, 33, 36), (110, 113, 120)

TINY = (
    "the red ball moves right",
    "make the blue box bigger",
    "the yellow triangle turns green",
    "the green triangle moves down",
    "the blue box jumps, then the red ball moves up",
    "a large purple diamond appears at the bottom left",
    "the purple diamond turns white",
    "the red ball explodes",
)
CHANCE = ("the red ball wanders off", "the wind blows", "the blue box wanders off", "everything scatters") * 2
SMOL = (
    "the red ball leaps",
    "the red ball goes to the right",
    "enlarge the blue box",
    "paint the yellow triangle green",
    "get rid of the red ball",
)
SHAPES = (
    Action(mouse=(11.5 / 64, 32.5 / 64, 16 / 64, -8 / 64)),
    Action("the blue box grows"),
    Action(keys=("yellow",), vector=(-16.0, 8.0)),
    Action(camera=Camera("velocity", Pose((-0.25, 0.0, 0.0)))),
    Action(camera=Camera("velocity", Pose((0.25, 0.0, 0.0)))),
)
MEMORY = (
    "hide the red ball",
    "the blue box moves up",
    "the yellow triangle turns green",
    "the green triangle moves down",
    "the red ball comes back",
    "the red ball jumps",
    "hide the blue box",
    "the blue box comes back",
)


@dataclass
class Panel:
    """The frames of one world, `FRAMES` for each of its rounds, and the action of each round."""

    title: str
    clips: list[np.ndarray]
    captions: list[str]


def play(name: str, start: str | np.ndarray, actions: Sequence[str | Action], title: str) -> Panel:
    """Play actions in a shipped world."""
    session = WorldModel.from_pretrained(name).session(seed=3)
    session.reset(start)
    clips = []
    for action in actions[:ROUNDS]:
        frames = session.step(action).frames
        clips.append(frames[1 :: len(frames) // FRAMES])
    return Panel(title, clips, [str(action) for action in actions[:ROUNDS]])


def doorkey() -> Panel:
    """Play an episode of MiniGrid, in which a scripted policy fetches the key, in the learned world."""
    settings = EnvironmentSettings(
        "minigrid:MiniGrid-DoorKey-6x6-v0", "worldmodel.games.minigrid:explore", size=(48, 48), max_steps=60
    )
    episodes = EnvironmentEpisodes(settings)
    found = (episodes.episode(index) for index in range(200))
    # One that reaches the goal as the animation ends.
    episode = next(each for each in found if each.terminated and len(each.actions) == 2 * ROUNDS)
    episodes.close()
    frames, actions = episode.cameras["render"], episode.actions
    # Its rounds have one frame, so two of them are shown in the time of one round of the other worlds.
    session = WorldModel.from_pretrained("minigrid-doorkey").session(seed=0)
    session.reset(np.asarray(frames[0]))
    clips, captions = [], []
    for first, second in zip(actions[: 2 * ROUNDS : 2], actions[1 : 2 * ROUNDS : 2], strict=True):
        shown = [session.step(action).frames for action in (first, second)]
        clips.append(np.repeat(np.concatenate(shown), FRAMES // 2, axis=0))
        captions.append(f"{first}, {second}")
    return Panel("minigrid-doorkey: keys", clips, captions)


def draw(panels: Sequence[Panel]) -> list[Image.Image]:
    """Return the pictures of the animation: the panels beside each other."""
    font = ImageFont.load_default(size=13)
    width = GAP + len(panels) * (SIDE + GAP)
    pictures = []
    for number in range(ROUNDS):
        for frame in range(FRAMES):
            picture = Image.new("RGB", (width, TITLE + SIDE + CAPTION + GAP), BACKGROUND)
            pen = ImageDraw.Draw(picture)
            for index, panel in enumerate(panels):
                left = GAP + index * (SIDE + GAP)
                pen.text((left, 3), panel.title, fill=FAINT, font=font)
                shown = Image.fromarray(panel.clips[number][frame])
                picture.paste(shown.resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, TITLE))
                pen.multiline_text(
                    (left, TITLE + SIDE + 5), wrapped(panel.captions[number], pen, font), fill=TEXT, font=font
                )
            pictures.append(picture)
    return pictures


def draw_strip(panel: Panel, rounds: int = 5) -> Image.Image:
    """Draw the last frame of every round of a world beside each other, each above its action."""
    font = ImageFont.load_default(size=13)
    picture = Image.new("RGB", (GAP + rounds * (SIDE + GAP), SIDE + CAPTION + 2 * GAP), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for number in range(rounds):
        left = GAP + number * (SIDE + GAP)
        shown = Image.fromarray(panel.clips[number][-1])
        picture.paste(shown.resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, GAP))
        words = wrapped(panel.captions[number], pen, font)
        pen.multiline_text((left, GAP + SIDE + 5), words, fill=TEXT, font=font)
    return picture


def draw_futures() -> Image.Image:
    """Draw a row for each kind of uncertain act: the start, the true outcomes, and the futures foreseen.

    Outcomes and futures are shown by their last frames, above their probabilities.
    """
    model, font = WorldModel.from_pretrained("shapes-chance"), ImageFont.load_default(size=12)
    cases = {case.kind: case for case in reversed(chance_cases(77, 0, 60))}
    side, line, columns = 96, 18, 9
    picture = Image.new(
        "RGB", (GAP + columns * (side + GAP), len(cases) * (2 * line + side + GAP)), BACKGROUND
    )
    pen = ImageDraw.Draw(picture)
    for row, kind in enumerate(sorted(cases)):
        case, top = cases[kind], row * (2 * line + side + GAP)
        session = model.session(seed=0)
        session.reset(case.start)
        futures = session.futures(case.action, num_draws=512, max_futures=4)
        shown = [(0, "start", case.start)]
        for place, outcome in enumerate(case.outcomes):
            shown.append((1 + place, f"{outcome.probability:.0%}", outcome.frames[-1]))
        for place, future in enumerate(futures):
            shown.append((5 + place, f"foreseen: {future.probability:.0%}", future.frames[-1]))
        pen.text((GAP, top + 2), case.caption, fill=TEXT, font=font)
        for column, words, frame in shown:
            left = GAP + column * (side + GAP)
            picture.paste(
                Image.fromarray(frame).resize((side, side), Image.Resampling.NEAREST), (left, top + line)
            )
            pen.text((left, top + line + side + 2), words, fill=FAINT, font=font)
    return picture


def wrapped(text: str, pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """Break a caption into lines of the width of a panel."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font=font) <= SIDE:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def draw_strips(panels: Sequence[Panel]) -> None:
    """Write a picture of every world, for the page that lists them."""
    folder = ROOT / "docs" / "assets" / "worlds"
    folder.mkdir(exist_ok=True)
    for panel in panels:
        draw_strip(panel).save(folder / f"{panel.title.partition(':')[0]}.png", optimize=True)


def main() -> None:
    """Play the worlds and write the pictures."""
    draw_futures().save(ROOT / "docs" / "assets" / "chance.png", optimize=True)
    start = str(ROOT / "demo" / "first_frame.png")
    panels = [
        play("shapes-tiny", start, TINY, "shapes-tiny: words"),
        play("shapes-chance", start, CHANCE, "shapes-chance: uncertain acts"),
        play("shapes-memory", start, MEMORY, "shapes-memory: a memory"),
        doorkey(),
    ]
    smol = play("shapes-smol", start, SMOL, "shapes-smol: paraphrases")
    draw_strips([*panels, smol, play("shapes", start, SHAPES, "shapes: every kind of action")])
    pictures = draw(panels)
    # One palette for all pictures, so that colours stay what they are.
    sample = Image.fromarray(np.concatenate([np.asarray(picture) for picture in pictures[::FRAMES]]))
    palette = sample.quantize(128)
    first, *others = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    path = ROOT / "docs" / "assets" / "worlds.gif"
    first.save(path, save_all=True, append_images=others, duration=240, loop=0, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
