"""Objectives by the name that `stages.NAME.objective` gives them."""

from worldmodel.config.train import ObjectiveName
from worldmodel.train.objectives.alignment import AlignmentObjective
from worldmodel.train.objectives.base import Objective
from worldmodel.train.objectives.codec import CodecObjective
from worldmodel.train.objectives.distillation import DistillationObjective, ImleObjective
from worldmodel.train.objectives.generator import GeneratorObjective, JointObjective
from worldmodel.train.objectives.language import LanguageObjective
from worldmodel.train.objectives.prompt import PromptDivergenceObjective, PromptObjective
from worldmodel.train.objectives.state import StateObjective

OBJECTIVES: dict[ObjectiveName, type[Objective]] = {
    "codec": CodecObjective,
    "language": LanguageObjective,
    "alignment": AlignmentObjective,
    "state": StateObjective,
    "generator": GeneratorObjective,
    "joint": JointObjective,
    "distill": DistillationObjective,
    "imle": ImleObjective,
    "prompt": PromptObjective,
    "prompt_kl": PromptDivergenceObjective,
}
