"""Vision alignment without labels: the feature of a latent cell tells its latents."""

from collections.abc import Mapping

from einops import rearrange
from torch import nn

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models.layers.norm import upcast
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.train.episodes import encode_first_frames
from worldmodel.train.objectives.base import Losses, Objective, SampleRng, StageBatch


class LabelFreeAlignmentObjective(Objective):
    """A linear head reads the latents of its cell from a feature, where a world has no words for cells.

    In the one comparison so far this brought nothing (docs/concepts/state-alignment.md).
    """

    weights: Mapping[str, float] = {"latents": 1.0}
    tasks = ("rounds", "describe", "ask", "inverse")

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.latents = nn.Linear(model.backbone.width, model.config.codec.latent_channels)

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        if not model.config.vision.sees_latents:
            raise ConfigError(
                "The objective needs a vision adapter that reads latents; leave out vision.encoder, or the "
                "stage."
            )
        latents = encode_first_frames(model, batch)
        return StageBatch(batch, rng, {"latents": float(len(latents) * model.config.codec.cells)}, latents)

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        cells = model.encode_observation(Observation(inputs.content)).cells
        assert cells is not None, "only the latents' own adapter makes cells"
        truth = rearrange(upcast(inputs.content), "b 1 c h w -> b (h w) c")
        return {"latents": (self.latents(upcast(cells[:, 0])) - truth).pow(2).mean(dim=-1).sum()}
