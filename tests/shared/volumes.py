"""Numbers of elements that attention over several processes sends, by the formulas of its two kinds."""

from collections.abc import Sequence

from worldmodel.parallel.ulysses import Heads


def gathered(key_heads: int, head_width: int, sizes: Sequence[int]) -> int:
    """Return how many elements a rank sends forward, and again backward, per sequence and layer.

    2 g d max(sizes) (P - 1): in the dtype of activations forward, in fp32 or better backward.
    """
    return 2 * key_heads * head_width * max(sizes) * (len(sizes) - 1)


def exchanged(heads: Heads, head_width: int, tokens: Sequence[int], rank: int) -> tuple[int, int]:
    """Return how many elements `rank` sends forward and backward, per sequence and layer.

    Every other rank r receives queries, keys and values of this rank's tokens, `n d (q_r + 2 g_r)`, and
    results of its heads, `n_r d q`; gradients are sent in the opposite direction. If all numbers are
    divisible, each direction sends (2 k + 2 g) d (S / P) (P - 1) / P for S tokens on P ranks.
    """
    forward = backward = 0
    query, key = [[len(part) for part in of] for of in (heads.query, heads.key)]
    for other in set(range(len(tokens))) - {rank}:
        forward += tokens[rank] * (query[other] + 2 * key[other]) + tokens[other] * query[rank]
        backward += tokens[other] * (query[rank] + 2 * key[rank]) + tokens[rank] * query[other]
    return forward * head_width, backward * head_width
