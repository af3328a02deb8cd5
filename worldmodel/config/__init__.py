"""Settings of models and training runs: frozen dataclasses, filled from YAML and `key=value`."""

from worldmodel.actions import ActionConfig, ActionSpec
from worldmodel.config.files import build, load, to_dict
from worldmodel.config.flow import FlowConfig, FlowSourceConfig, FlowStageConfig
from worldmodel.config.generator import ConditionAdapterConfig, GeneratorConfig
from worldmodel.config.model import (
    SMALL_DECODER,
    BackboneConfig,
    CodecConfig,
    ImageSize,
    VisionConfig,
    WorldModelConfig,
    height_width,
)
from worldmodel.config.state import StateConfig
from worldmodel.config.train import (
    DataConfig,
    DiagnosticsConfig,
    MeshConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
)

__all__ = [
    "SMALL_DECODER",
    "ActionConfig",
    "ActionSpec",
    "BackboneConfig",
    "CodecConfig",
    "ConditionAdapterConfig",
    "DataConfig",
    "DiagnosticsConfig",
    "FlowConfig",
    "FlowSourceConfig",
    "FlowStageConfig",
    "GeneratorConfig",
    "ImageSize",
    "MeshConfig",
    "SourceConfig",
    "StageConfig",
    "StateConfig",
    "TrainConfig",
    "TrainedConfig",
    "ValidationConfig",
    "VisionConfig",
    "WorldModelConfig",
    "build",
    "height_width",
    "load",
    "to_dict",
]
