"""The objectives that a stage of a config may name."""

from worldmodel.train.objectives.generator import (
    GeneratorObjective,
    JointObjective,
    PromptDivergenceObjective,
    PromptObjective,
)
from worldmodel.train.objectives.states import (
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
