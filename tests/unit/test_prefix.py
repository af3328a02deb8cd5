"""The prefix cache: states are unchanged, prefixes are computed once and shared, memory is bounded."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.prefix_cache import History
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine

NUM_QUERIES = 5


def parts(count: int, seed: int = 0, length: int = 9) -> History:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, 64, generator=generator) * 0.1 for _ in range(count))


@torch.no_grad()
def uncached(backbone: Backbone, history: History) -> torch.Tensor:
    return backbone(torch.cat(history)[None])[0, -NUM_QUERIES:]


class Counted(Backbone):
    """A backbone that counts the positions it computes."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone.model, backbone.tokenizer)
        self.positions = 0

    def forward(self, embeds: torch.Tensor, cache: object = None) -> torch.Tensor:
        self.positions += embeds.shape[0] * embeds.shape[1]
        return super().forward(embeds, cache)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_batches_of_any_histories_equal_the_uncached_pass(
    model: WorldModel, calls: list[list[tuple[int, int]]]
) -> None:
    engine = LocalEngine(model.backbone)
    for call in calls:
        histories = [parts(1 + count, seed, 6 + seed) for count, seed in call]
        for history, states in zip(histories, engine.predict_states(histories, NUM_QUERIES), strict=True):
            torch.testing.assert_close(states, uncached(model.backbone, history), atol=1e-5, rtol=1e-4)


def test_only_new_positions_are_computed_and_forks_share(model: WorldModel) -> None:
    backbone = Counted(model.backbone)
    engine = LocalEngine(backbone)
    history = parts(4)
    for count in range(1, 5):
        engine.predict_states([history[:count]], NUM_QUERIES)
    assert backbone.positions == 4 * 9
    same_world_of_another = tuple(part.clone() for part in history[:3])
    engine.predict_states([(*same_world_of_another, parts(1, seed=7)[0])], NUM_QUERIES)
    assert backbone.positions == 5 * 9


def test_memory_is_bounded_and_evicted_prefixes_are_recomputed(model: WorldModel) -> None:
    probe = LocalEngine(model.backbone)
    probe.predict_states([parts(1)], NUM_QUERIES)
    limit = 3 * probe.cache.num_bytes
    engine = LocalEngine(model.backbone, max_cache_bytes=limit)
    for seed in range(8):
        engine.predict_states([parts(1, seed)], NUM_QUERIES)
        assert engine.cache.num_bytes <= limit
    again = (*parts(1, seed=0), *parts(1, seed=99))
    states = engine.predict_states([again], NUM_QUERIES)[0]
    torch.testing.assert_close(states, uncached(model.backbone, again), atol=1e-5, rtol=1e-4)
