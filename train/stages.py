"""The objectives that a stage of a config may name."""

from worldmodel.train.generation import (
    GeneratorObjective,
    JointObjective,
    PromptDivergenceObjective,
    PromptObjective,
)
from worldmodel.train.objectives import (
    AlignmentObjective,
    CodecObjective,
    LanguageObjective,
    Objective,
    StateObjective,
)

OBJECTIVES: dict[str, type[Objective]] = {
    "codec": CodecObjective,
    "language": LanguageObjective,
    "alignment": AlignmentObjective,
    "state": StateObjective,
    "generator": GeneratorObjective,
    "joint": JointObjective,
    "prompt": PromptObjective,
    "prompt_kl": PromptDivergenceObjective,
}
