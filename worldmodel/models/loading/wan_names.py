"""The names of Wan's own repository, which Self Forcing and CausVid keep, for weights of diffusers' Wan."""

import re
from collections.abc import Mapping
from typing import Any

from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

ROLES = ("generator_ema.", "generator.")
"""What holds the transformer in a checkpoint of training, beside its critic; averaged weights come first."""
WRAPPERS = re.compile(r"^model\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")


def to_diffusers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights of a transformer by their names in diffusers; those that have them stay as they are."""
    role = next((each for each in ROLES if any(name.startswith(each) for name in weights)), "")
    found = {
        WRAPPERS.sub("", name.removeprefix(role)): weight
        for name, weight in weights.items()
        if name.startswith(role)
    }
    if "head.head.weight" not in found:
        return dict(weights)
    return convert_wan_transformer_to_diffusers(found)
