"""Settings of training runs on the shapes world."""

import dataclasses
from pathlib import Path

from worldmodel.config import (
    DataConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    WorldModelConfig,
)

SHAPES = DataConfig({"shapes": SourceConfig("shapes")})
ALIGNED = {"backbone": TrainedConfig(), "adapters": TrainedConfig()}
WHOLE = {name: TrainedConfig() for name in ("backbone", "adapters", "generator")}
BY_LORA = WHOLE | {name: TrainedConfig(lora_rank=4) for name in ("backbone", "generator")}


def short_run(model: WorldModelConfig, tokenizer_folder: str, run_dir: Path) -> TrainConfig:
    """A run of six steps of state alignment, mixed with text tasks.

    It does not measure the codec alone.
    """
    stage = StageConfig(
        "state",
        steps=6,
        batch_size=3,
        microbatch_size=2,
        warmup_steps=2,
        ema_decay=0.9,
        tasks={"rounds": 0.6, "describe": 0.4},
        train=ALIGNED,
        self_rollout=(0.5, 0.5),
    )
    return TrainConfig(
        model=model,
        stages={"state": stage},
        data=SHAPES,
        validation=ValidationConfig(codec_frames=0),
        tokenizer=tokenizer_folder,
        run_dir=str(run_dir),
        precision="fp32",
        log_every=1,
    )


def changed(config: TrainConfig, **values: object) -> TrainConfig:
    """Change the one stage of a run."""
    return dataclasses.replace(
        config, stages={"state": dataclasses.replace(config.stages["state"], **values)}
    )
