"""Stages of every objective of our own model, for tests of what they have in common."""

from worldmodel.config import StageConfig, TrainedConfig

DISTILL = "worldmodel.experiments.distillation:DistillationObjective"
IMLE = "worldmodel.experiments.distillation:ImleObjective"
EVERYTHING = {"all": TrainedConfig()}
STAGES = {
    "codec": StageConfig("codec", tasks={"rounds": 1.0}, train={"codec": TrainedConfig()}, rounds=1),
    "language": StageConfig("language", tasks={"document": 1.0}, train={"backbone": TrainedConfig()}),
    "alignment": StageConfig("alignment", tasks={"rounds": 1.0}, train={"vision": TrainedConfig()}),
    "state": StageConfig("state", tasks={"rounds": 1.0}, train=EVERYTHING),
    "describe": StageConfig("state", tasks={"describe": 1.0}, train=EVERYTHING),
    "imagine": StageConfig("state", tasks={"imagine": 1.0}, train=EVERYTHING, rounds=1),
    "rollout": StageConfig("state", tasks={"rounds": 1.0}, train=EVERYTHING, self_rollout=(1.0, 1.0)),
    "generator": StageConfig("generator", tasks={"rounds": 1.0}, train=EVERYTHING),
    "joint": StageConfig("joint", tasks={"rounds": 1.0}, train=EVERYTHING, self_rollout=(1.0, 1.0)),
    "distill": StageConfig(
        DISTILL, {"teacher_steps": 2}, tasks={"rounds": 1.0}, train={"generator": TrainedConfig()}
    ),
    "imle": StageConfig(
        IMLE, {"num_candidates": 2}, tasks={"rounds": 1.0}, train={"generator": TrainedConfig()}, rounds=1
    ),
    "lora": StageConfig(
        "joint",
        tasks={"rounds": 1.0},
        train={"backbone": TrainedConfig(lora_rank=2), "adapters": TrainedConfig()},
    ),
}
