"""Whether a stage of vision alignment without labels helps state alignment, on a recording of DoorKey.

Two models of width 96 see equally many batches of transitions: one is trained by state alignment alone,
the other first by 40 steps of vision alignment. The recording is that of `configs/doorkey.yaml`; 300 episodes
suffice.
"""

import argparse
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor, nn

from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    DataConfig,
    SourceConfig,
    TrainConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.config.model import SMALL_DECODER
from worldmodel.data.loader import Batch
from worldmodel.data.sources import open_source
from worldmodel.models.loading import deferred
from worldmodel.train import start
from worldmodel.train.objectives.alignment import AlignmentObjective
from worldmodel.train.objectives.base import Objective, SampleRng, StageBatch
from worldmodel.train.objectives.state import StateObjective
from worldmodel.types import Episode

ALIGNED, STEPS, EVERY, BATCH = 40, 200, 40, 16
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
MODEL = WorldModelConfig(
    fps=10,
    chunk_frames=1,
    history_rounds=1,
    pace="on_action",
    codec=CodecConfig(image_size=48, temporal_factor=1),
    action=ActionConfig(text=False, keys=("left", "right", "forward", "pickup", "drop", "toggle", "done")),
    backbone=BackboneConfig(architecture={**SMALL_DECODER, **SIZES, **HEADS}, vocab_size=258),
    vision=VisionConfig(width=64),
    condition_adapter=ConditionAdapterConfig(width=96, num_layers=2, num_heads=3),
    generator=None,
    num_inference_steps=0,
)


class Arm:
    """A model in training, and its two objectives."""

    def __init__(self, seed: int, aligned: int) -> None:
        config = TrainConfig(model=MODEL, init_from={"codec": "minigrid-doorkey"}, seed=seed)
        self.model = start.build_model(config)
        deferred.materialize(self.model, torch.device("cpu"))
        deferred.load_shards(self.model)
        self.model.codec.requires_grad_(False)
        torch.manual_seed(seed)
        self.state, self.alignment = StateObjective(self.model), AlignmentObjective(self.model)
        self.seed, self.aligned, self.done = seed, aligned, 0
        everything = nn.ModuleList([self.model, self.state, self.alignment])
        self.trained = [parameter for parameter in everything.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-3)
        self.rng = np.random.default_rng(seed)

    def step(self, episodes: list[Episode]) -> None:
        """Train on one batch."""
        objective = self.alignment if self.done < self.aligned else self.state
        chosen = [episodes[row] for row in self.rng.integers(len(episodes), size=BATCH)]
        inputs = self.prepare(objective, chosen, (self.done + 1) * BATCH, self.seed)
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, self.done / 20)
        losses = objective(self.model, inputs)
        total: Tensor = sum(
            (objective.weights[name] * loss / max(float(inputs.counts[name]), 1.0))
            for name, loss in losses.items()
            if name in objective.weights
        )  # type: ignore[assignment]
        self.optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def prepare(self, objective: Objective, episodes: list[Episode], first: int, seed: int) -> StageBatch:
        """Encode a batch of episodes."""
        batch = Batch(0, "rounds", tuple(range(first, first + len(episodes))), episodes)
        return objective.prepare(self.model, batch, SampleRng([(seed, index) for index in batch.indices]))

    @torch.no_grad()
    def validate(self, episodes: list[Episode]) -> dict[str, float]:
        """Return the mean squared error of changed and unchanged cells."""
        sums: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for first in range(0, len(episodes), 60):
            inputs = self.prepare(self.state, episodes[first : first + 60], first, 7)
            losses = self.state(self.model, inputs)
            for name in ("changed", "unchanged"):
                sums[name] += float(losses[name])
                counts[name] += float(inputs.counts[name])
        return {name: sums[name] / counts[name] for name in sums}


def main() -> None:
    """Print the errors on held-out episodes every few steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="recordings", help="LeRobot dataset of the recorder")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    data = DataConfig({"recorded": SourceConfig("lerobot", args.data, split="all")})
    source = open_source("recorded", data, MODEL)

    def transitions(rows: range) -> list[Episode]:
        whole = [source.at(row).episode("rounds", 0, row, 14) for row in rows]
        return [
            Episode(each.name, (each.observations[index][-1:], each.observations[index + 1]), (action,))
            for each in whole
            for index, action in enumerate(each.actions)
        ]

    train, held = transitions(range(60)), transitions(range(240, 252))[:120]
    for seed in range(args.seeds):
        arms = {"state alone": Arm(seed, 0), f"{ALIGNED} steps of alignment first": Arm(seed, ALIGNED)}
        for done in range(1, STEPS + 1):
            for name, arm in arms.items():
                arm.step(train)
                if done % EVERY == 0:
                    errors = {key: round(value, 4) for key, value in arm.validate(held).items()}
                    loss = 0.5 * errors["changed"] + errors["unchanged"]
                    print(f"seed {seed}, {done} steps, {name}: validation {loss:.4f} {errors}", flush=True)


if __name__ == "__main__":
    main()
