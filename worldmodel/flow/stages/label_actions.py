"""The stage `label_actions`: a model's inverse dynamics gives actions to videos that have none."""

from collections.abc import Mapping

import pyarrow as pa

from worldmodel.flow.catalog.clips import COLUMNS
from worldmodel.flow.stages.base import Resources, stage
from worldmodel.flow.stages.rows import result_of
from worldmodel.flow.stages.weights import weights_digest

OUTPUTS = pa.schema({"actions": pa.string()})


@stage(
    version="2",
    inputs=["video", *(name for name in COLUMNS if name != "actions")],
    outputs=OUTPUTS.names,
    uncounted=["device", "max_rows"],
    resources=Resources(cpu=1.0, gpu=1.0, memory_gb=8.0),
    batch_size=4,
    timeout_s=600.0,
    weights=lambda *, model, **_: weights_digest(model, ["."]),
)
class LabelActions:
    """Names the action of every round of a clip, as `Session.infer_action` does.

    Clips that have actions (keys, numbers, or texts with times or for every round) keep them: their `actions`
    are null. One text for a whole clip is a caption and not an action.

    Args:
        model: a shipped model, a model folder, or a repository on the Hub; its rounds are those of the
            training.
        columns: as `data.sources.NAME.columns` of the training.
        max_frames: longest clip that is labelled, in frames of the model; the rest of longer ones is not.
        max_rows: rounds that the model looks at together.
        device: where the model runs; empty takes a GPU if there is one.

    Raises:
        ConfigError: a setting is wrong.
        ModelError: there is no such model.
    """

    def __init__(
        self,
        *,
        model: str,
        columns: Mapping[str, str] | None = None,
        max_frames: int = 1000,
        max_rows: int = 64,
        device: str = "",
    ) -> None:
        # It imports torch, which other workers need not.
        from worldmodel.flow.stages.action_labeler import ActionLabeler

        self.run = ActionLabeler(model, columns, max_frames, max_rows, device)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return result_of(batch, OUTPUTS, self.run(batch))
