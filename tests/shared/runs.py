"""Settings of training runs on the shapes world."""

import dataclasses

from worldmodel.config import DataConfig, SourceConfig, TrainConfig, TrainedConfig

SHAPES = DataConfig({"shapes": SourceConfig("shapes")})
ALIGNED = {"backbone": TrainedConfig(), "adapters": TrainedConfig()}
WHOLE = {name: TrainedConfig() for name in ("backbone", "adapters", "generator")}
BY_LORA = WHOLE | {name: TrainedConfig(lora_rank=4) for name in ("backbone", "generator")}


def changed(config: TrainConfig, **values: object) -> TrainConfig:
    """Change the one stage of a run."""
    return dataclasses.replace(
        config, stages={"state": dataclasses.replace(config.stages["state"], **values)}
    )
