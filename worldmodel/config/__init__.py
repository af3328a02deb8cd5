"""Every setting of a model and of its training: frozen dataclasses, filled from YAML and `key=value`."""

from worldmodel.config.files import build, load, to_dict
from worldmodel.config.model import (
    SMALL_DECODER,
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionConfig,
    GeneratorConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.config.train import (
    DataConfig,
    MeshConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
)

__all__ = [
    "SMALL_DECODER",
    "ActionConfig",
    "BackboneConfig",
    "CodecConfig",
    "ConditionConfig",
    "DataConfig",
    "GeneratorConfig",
    "MeshConfig",
    "SourceConfig",
    "StageConfig",
    "TrainConfig",
    "TrainedConfig",
    "VisionConfig",
    "WorldModelConfig",
    "build",
    "load",
    "to_dict",
]
