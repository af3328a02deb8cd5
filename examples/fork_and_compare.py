"""Fork one state, take two actions, and see where the futures differ."""

from pathlib import Path

import numpy as np

from worldmodel import WorldModel

ROOT = Path(__file__).parents[1]

session = WorldModel.from_pretrained("shapes-tiny").session(seed=0)
session.reset(ROOT / "demo" / "first_frame.png")
session.step("the red ball moves right")
moment = session.snapshot()
other = session.fork()

first = session.step("the blue box jumps").frames
second = other.step("the blue box vanishes").frames
difference = np.abs(first.astype(int) - second).max(axis=-1)
for index, frame in enumerate(difference):
    rows, columns = np.nonzero(frame > 30)
    where = (
        f"rows {rows.min()}-{rows.max()}, columns {columns.min()}-{columns.max()}" if len(rows) else "none"
    )
    print(f"frame {index}: {len(rows):4d} pixels differ ({where})")

session.restore(moment)
assert np.array_equal(session.step("the blue box jumps").frames, first), "a restored state replays exactly"
