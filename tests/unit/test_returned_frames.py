"""Frames that sessions return belong to the caller."""

import numpy as np

from worldmodel.models.world_model import WorldModel


def test_frames_that_are_drawn_on_change_no_state(model: WorldModel, image: np.ndarray) -> None:
    session = model.session(seed=3)
    session.reset(image)
    frames = session.step("the red ball moves left").frames
    kept, fork, before = frames.copy(), session.fork(), session.snapshot()
    frames[:] = 0
    session.clips[0][:] = 0
    for clip in (session.clips[-1], fork.clips[-1], before.state.frames[0], before.recording.clips[-1]):
        assert np.array_equal(clip, kept)
    assert session.clips[0].any()
    own = image.copy()
    shown = session.reset(own)
    own[:] = shown[:] = 0
    assert session.state.frames.any()
