"""Record clips, fine-tune the shipped model for a few steps, and play the result."""

import subprocess
import sys
from pathlib import Path

from worldmodel import WorldModel, get_world

ROOT = Path(__file__).parents[1]
OUT = Path("outputs/examples/fine-tune")
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10

table = get_world("shapes").record(OUT / "clips", 12, rounds=2)
subprocess.run(
    [
        sys.executable,
        "-m",
        "worldmodel",
        "train",
        "own_clips",
        f"data.sources.mine.path={table}",
        f"stages.tune.steps={STEPS}",
        "stages.tune.batch_size=2",
        f"run_dir={OUT / 'run'}",
    ],
    check=True,
)
session = WorldModel.from_pretrained(OUT / "run" / "model").session(seed=0)
session.reset(ROOT / "demo" / "first_frame.png")
session.step("the red ball moves right")
print(session.save(OUT / "rollout.png"))
