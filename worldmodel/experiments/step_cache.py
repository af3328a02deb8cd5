"""Step caching: a denoising step reuses the generator's last prediction where it would hardly change.

The caches of diffusers (`FirstBlockCacheConfig` and the others) belong to a transformer: they hold one state
for the whole batch, and decide by its mean. Here chunks of several worlds join and leave a batch between
steps, so every row of every chunk has its own.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Latents = Float[Tensor, "b t c h w"]
PerRow = Float[Tensor, " b"]


@dataclass
class StepCache:
    """The last computed prediction of each row of a chunk, and how fast predictions change.

    While a chunk is denoised, the change of the prediction is nearly proportional to the change of the
    latents. So the relative change since the last computed step is known without the generator, and below
    `threshold` its prediction is used again; with Euler's method this makes one long step of two. The first
    two steps, which find the rate, and the last one are always computed.

    Source: EasyCache (arXiv:2507.02860), sec. 3. There, changes of single steps are added up, and what is
    reused is the difference of prediction and latents.
    """

    threshold: float
    latents: Latents | None = None
    """Latents at the last computed step of each row."""
    prediction: Latents | None = None
    """Prediction for them, after guidance."""
    rate: PerRow | None = None
    """Change of the prediction per change of the latents, by the last two computed steps."""
    computed: Bool[Tensor, " b"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Rows whose prediction is computed at the present step, on the CPU."""

    def decide(self, latents: Latents, last: bool) -> Bool[Tensor, " b"]:
        """Return the rows whose prediction the next step needs; `last` is whether no step follows it."""
        if self.latents is None or self.prediction is None or self.rate is None or last:
            self.computed = torch.ones(len(latents), dtype=torch.bool)
        else:
            change = self.rate * _size(latents - self.latents) / _size(self.prediction)
            self.computed = (change >= self.threshold).cpu()
        return self.computed

    def complete(self, latents: Latents, computed: Float[Tensor, "n t c h w"]) -> Latents:
        """Return the predictions of all rows: the computed ones, and those that are reused."""
        if self.latents is None or self.prediction is None:
            self.latents, self.prediction = latents, computed
            return computed
        if not len(computed):
            return self.prediction
        rows = self.computed.nonzero()[:, 0].to(latents.device)
        moved = _size(latents[rows] - self.latents[rows]).clamp(min=1e-12)
        rate = _size(computed - self.prediction[rows]) / moved
        whole = latents.new_zeros(len(latents)) if self.rate is None else self.rate
        self.rate = whole.index_copy(0, rows, rate.to(whole))
        self.latents = self.latents.index_copy(0, rows, latents[rows])
        self.prediction = self.prediction.index_copy(0, rows, computed)
        return self.prediction


def _size(x: Latents) -> PerRow:
    """Return the mean absolute value of each row."""
    return x.abs().flatten(1).mean(dim=1)
