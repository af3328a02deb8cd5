"""The demo's HTML of what runs, what waits, and what a model may not have understood."""

import re
import time

import numpy as np

from worldmodel.actions import Action
from worldmodel.demo import rendering
from worldmodel.demo.history import Moment
from worldmodel.demo.jobs import Job


def test_what_runs_and_waits_has_time_progress_and_cancel() -> None:
    running = Job("the <red> ball jumps", began=time.monotonic() - 7.2, progress=40)
    waiting = [Job("undo"), Job("the blue box falls")]
    shown = rendering.status([running, *waiting], "The server is busy.")
    assert "the &lt;red&gt; ball jumps" in shown
    assert "7 s · 40 %" in shown
    assert 'value="40"' in shown
    buttons = re.findall(r'<button type="button" data-index="(\d+)" aria-label="Cancel: ([^"]+)"', shown)
    expected = [
        (str(job.number), job.label.replace("<", "&lt;").replace(">", "&gt;")) for job in (running, *waiting)
    ]
    assert buttons == expected
    assert 'role="alert">The server is busy.' in shown
    assert "value=" not in rendering.status([Job("unknown progress", began=time.monotonic())])
    assert rendering.status([]) == ""


def test_words_that_may_not_have_been_understood_are_marked() -> None:
    clip = np.zeros((1, 8, 8, 3), np.uint8)
    for doubtful in (False, True):
        moment = Moment(Action.of("make a dragon fly"), clip, doubtful=doubtful)
        assert ('class="wm-doubt"' in rendering.stage(moment, None, 8, "Round 5")) is doubtful
    unlike = Moment(None, clip, unlike=True)
    assert rendering.UNKNOWN in rendering.stage(unlike, None, 8, "Start")
