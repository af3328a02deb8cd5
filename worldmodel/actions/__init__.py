"""Actions: a module for each kind (text, keys, vector, mouse, camera), and a registry for kinds of your own.

`Action` is the action of a round. An `ActionKind` is all that the rest of the package knows of a kind: how it
is parsed, checked, said in words, sent over HTTP, embedded and offered on a page.

Names of axes in all shapes: `b` batch, `r` rounds, `t` frames, `c` channels, `h w` pixels or latent
cells, `n` tokens, `d` width, `k` heads, `a` action width.
"""

from worldmodel.actions.action import Action, AnyAction, example_action, resolve_camera_targets
from worldmodel.actions.camera import Camera, CameraKind, Mode
from worldmodel.actions.config import ActionConfig
from worldmodel.actions.keys import KeysKind
from worldmodel.actions.kind import ActionKind, Numbers, NumbersKind, Rows, Words
from worldmodel.actions.mouse import MouseKind
from worldmodel.actions.numbers import MAX_NUMBER
from worldmodel.actions.pose import Pose
from worldmodel.actions.registry import action_kind, action_kinds, control_kinds, register_action_kind
from worldmodel.actions.spec import ActionSpec, settings_of_specs, specs_by_kind
from worldmodel.actions.text import TextKind
from worldmodel.actions.vector import VectorKind

# The order is that of their positions in the backbone's sequence.
for _kind in (TextKind(), KeysKind(), VectorKind(), MouseKind(), CameraKind()):
    register_action_kind(_kind)

__all__ = [
    "MAX_NUMBER",
    "Action",
    "ActionConfig",
    "ActionKind",
    "ActionSpec",
    "AnyAction",
    "Camera",
    "Mode",
    "Numbers",
    "NumbersKind",
    "Pose",
    "Rows",
    "Words",
    "action_kind",
    "action_kinds",
    "control_kinds",
    "example_action",
    "register_action_kind",
    "resolve_camera_targets",
    "settings_of_specs",
    "specs_by_kind",
]
