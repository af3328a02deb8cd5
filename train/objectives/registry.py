"""Objectives by the name that `stages.NAME.objective` gives them."""

from worldmodel.config import StageConfig
from worldmodel.config.imports import check_arguments, find_extension
from worldmodel.errors import ConfigError
from worldmodel.train.objectives.alignment import AlignmentObjective
from worldmodel.train.objectives.base import Objective
from worldmodel.train.objectives.codec import CodecObjective
from worldmodel.train.objectives.generator import GeneratorObjective, JointObjective
from worldmodel.train.objectives.language import LanguageObjective
from worldmodel.train.objectives.prompt import PromptDivergenceObjective, PromptObjective
from worldmodel.train.objectives.state import StateObjective

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


def objective_class(stage: StageConfig) -> type[Objective]:
    """Return the objective of a stage: one of `OBJECTIVES`, of an entry point, or of MODULE:NAME.

    Raises:
        ConfigError: it cannot be imported, is not a subclass of `Objective`, or does not take
            `objective_args`.
    """
    found = find_extension("objective", stage.objective, "worldmodel.objectives", OBJECTIVES)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(
            f"objective is {stage.objective!r}, which is not a subclass of "
            "worldmodel.train.objectives.base.Objective; derive it from that class."
        )
    check_arguments("objective_args", found, 1, stage.objective_args)
    return found
