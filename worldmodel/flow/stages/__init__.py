"""The stages that come with the package, found by name."""

from worldmodel.config.imports import import_object
from worldmodel.errors import ConfigError
from worldmodel.flow.stages.base import Stage

STAGES = {
    "fetch": "worldmodel.flow.stages.fetch:Fetch",
    "probe": "worldmodel.flow.stages.probe:probe",
    "split": "worldmodel.flow.stages.split:Split",
    "deduplicate": "worldmodel.flow.stages.deduplicate:Deduplicate",
    "filter": "worldmodel.flow.stages.filter:Filter",
    "label_actions": "worldmodel.flow.stages.label_actions:LabelActions",
    "encode": "worldmodel.flow.stages.encode:Encode",
    "caption": "worldmodel.flow.stages.caption:Captioner",
}
"""Module and name of each stage; imported on first use."""


def find_stage(name: str) -> Stage:
    """Return a stage by its name, or a stage of one's own as `module:function`.

    Raises:
        ConfigError: there is none.
    """
    if name not in STAGES and ":" not in name:
        known = ", ".join(STAGES)
        raise ConfigError(f"There is no stage {name!r}; use {known}, or module:function for your own.")
    found = load_attribute(STAGES.get(name, name))
    if not isinstance(found, Stage):
        raise ConfigError(f"{name!r} is not a stage; decorate it with worldmodel.flow.stages.base.stage.")
    return found


def load_attribute(path: str) -> object:
    """Import `module:attribute`.

    Raises:
        ConfigError: the module or the attribute does not exist.
    """
    try:
        return import_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path!r} cannot be imported ({error}); write module:function.") from None
