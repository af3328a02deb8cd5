"""Planning: search for actions that lead a world to a goal, by playing them in a model.

`worldmodel.planning.environment` carries plans out in real environments.
"""

from worldmodel.planning.objective import GoalImage, Objective, Reached, Return, Trajectory
from worldmodel.planning.proposals import ActionSet, Box, Choices, action_set
from worldmodel.planning.search import METHODS, Plan, PlanSettings, plan
from worldmodel.planning.simulator import ModelSimulator, Simulator

__all__ = [
    "METHODS",
    "ActionSet",
    "Box",
    "Choices",
    "GoalImage",
    "ModelSimulator",
    "Objective",
    "Plan",
    "PlanSettings",
    "Reached",
    "Return",
    "Simulator",
    "Trajectory",
    "action_set",
    "plan",
]
