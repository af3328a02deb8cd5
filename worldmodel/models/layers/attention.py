"""The attention function of the generator and of every transformers backbone.

A `Layout` is the mask. If processes share the layout, they exchange heads, keys and values
(`worldmodel.parallel`), and the result equals that of one process. `use` selects the kernel:

    reference   the formula in fp32 or better, head by head: the split of heads does not change the result
    sdpa        torch's fused attention with a dense mask; plain products for bf16 on a CPU
    flex        compiled block-sparse attention, for long sequences with any mask; trains on CUDA
    flash       flash-attn, for packed causal documents on CUDA (`openworldmodel[flash]`)
    auto        flash or flex for long sequences on CUDA, sdpa elsewhere
    unmasked    torch's fused attention without a mask: the memory of flex and flash, for estimates
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from worldmodel.errors import ConfigError, pip_install
from worldmodel.parallel.context import all_gather_kv
from worldmodel.parallel.head_exchange import exchange_heads
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.ulysses import divide_heads, head_groups

NAME = "worldmodel"
"""Name of this attention in transformers (`attn_implementation`)."""

KERNELS = ("auto", "reference", "sdpa", "flex", "flash", "unmasked")
DENSE_LENGTH = 2048
"""Number of keys up to which `auto` uses a dense mask on CUDA: at most 4 MB, and no compilation.

Attention to so many keys is at most 6 % of a layer's operations (Qwen2.5 7B: 29 of 495 MFLOP a token).
"""

Mask = Layout | Bool[Tensor, "n m"] | None
KeyValue = tuple[Tensor, Tensor]
"""Keys and values of tokens, `[b, g, n, d]` each."""

_kernel = "auto"


def use(name: str) -> None:
    """Set the attention kernel of this process.

    Raises:
        ConfigError: there is no such kernel, or it is not installed.
    """
    global _kernel
    if name not in KERNELS:
        raise ConfigError(f"attention is {name!r}; use one of {', '.join(KERNELS)}.")
    if name == "flash" and not _flash_installed():
        raise ConfigError(
            f"attention=flash needs flash-attn, which is not installed: {pip_install('flash')} (a CUDA "
            "compiler builds it), or use attention=auto."
        )
    _kernel = name


@contextmanager
def using(name: str) -> Iterator[None]:
    """Set the attention kernel within a block."""
    before = _kernel
    use(name)
    try:
        yield
    finally:
        use(before)


def attend(
    query: Float[Tensor, "b k n d"],
    key: Float[Tensor, "b g m d"],
    value: Float[Tensor, "b g m d"],
    layout: Mask = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "b k n d"]:
    """Scaled dot-product attention with the mask `layout`; without one every query attends to every key.

    `k / g` neighbouring query heads share a key head (Ainslie et al. 2023, arXiv:2305.13245).
    If there are fewer queries than keys, the queries are the last tokens of the layout. With shards, `n` and
    `m` are the tokens of this process, and the call is a collective of the sequence group.

    Args:
        query: queries.
        key: keys.
        value: values.
        layout: the mask; without shards also a matrix, True where query n attends to key m.
        scale: factor of the scores; `d ** -0.5` if None.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118).
        window: number of last tokens of its document that a token attends to, itself included; None is all.
    """
    return _attend(query, key, value, layout, None, scale, softcap, window)[0]


def attend_cached(
    query: Float[Tensor, "b k n d"],
    key: Float[Tensor, "b g m d"],
    value: Float[Tensor, "b g m d"],
    layout: Mask = None,
    past: KeyValue | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "b k n d"], KeyValue]:
    """Attend to earlier tokens, too; return also the keys and values with which later tokens continue.

    With shards, these are the keys and values of all tokens for the heads of this process, so that processes
    exchange them once. `past` is what earlier calls returned; the other arguments are those of `attend`.
    """
    out, presents = _attend(query, key, value, layout, past, scale, softcap)
    if len(presents) == 1:
        return out, presents[0]
    keys, values = zip(*presents, strict=True)
    return out, (torch.cat(keys, dim=1), torch.cat(values, dim=1))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Mask,
    past: KeyValue | None,
    scale: float | None,
    softcap: float | None,
    window: int | None = None,
) -> tuple[Tensor, list[KeyValue]]:
    """Attend as `attend_cached`; return the keys and values by group of heads."""
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    # One process, or the whole sequence on each: no collective, and the code below does not run.
    shards = layout.shards if isinstance(layout, Layout) else None
    if shards is None:
        present = key, value
        if past is not None:
            key, value = _joined(past, present)
        return _compute(query, key, value, layout, scale, softcap, window), [present]
    sequence, presents = shards.group, []
    sp_group, cp_group = sequence.sp_group, sequence.cp_group
    assert sp_group is not None and cp_group is not None, "shards need the process groups of a mesh"
    # sp first: tokens of all heads become all tokens of some heads (of this cp row). Then cp gathers the keys
    # and values of the other rows, for these heads only. The mask stays that of the layout.
    groups = [divide_heads(query.shape[1], key.shape[1], sequence.sp)]
    if sequence.sp > 1:
        groups = head_groups(groups[0], query, shards.sp_sizes)
    # Keys and values of earlier tokens were kept after their exchange, so they are already by head.
    counts = [len(heads.key[sequence.sp_rank]) for heads in groups]
    pasts = None if past is None else list(zip(*(part.split(counts, dim=1) for part in past), strict=True))

    def attend_group(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if sequence.cp > 1:
            key, value = all_gather_kv(key, value, shards.cp_sizes, cp_group)
        presents.append((key, value))
        if pasts is not None:
            key, value = _joined(pasts[index], (key, value))
        read = groups[index].readers(sequence.sp_rank)
        if read is not None:  # uneven groups: repeat key heads, one for each query head
            key, value = (torch.stack([part[:, head] for head in read], dim=1) for part in (key, value))
        return _compute(query, key, value, layout, scale, softcap, window)

    if sequence.sp > 1:
        parts = [query, key, value]
        return exchange_heads(attend_group, parts, groups, shards.sp_sizes, sp_group), presents
    return attend_group(0, query, key, value), presents


def _joined(past: KeyValue, present: KeyValue) -> KeyValue:
    return torch.cat([past[0], present[0]], dim=2), torch.cat([past[1], present[1]], dim=2)


# ---- kernels: queries with all of their keys -----------------------------------------------------------


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Mask,
    scale: float,
    softcap: float | None,
    window: int | None = None,
) -> Tensor:
    name = _kernel
    # A mask of ones would select slower kernels for the same result.
    if isinstance(layout, Layout) and not layout.masked:
        layout = None
    if name == "auto":
        name = _choose(query, layout)
    # Their masks describe all queries of the layout; the last queries after cached keys, and windows, take a
    # dense mask.
    plain = window is None and name in ("flex", "flash")
    if plain and isinstance(layout, Layout) and query.shape[2] == layout.queries:
        return (_flex if name == "flex" else _flash)(query, key, value, layout, scale, softcap)
    if name == "unmasked":
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=shared)
    mask = layout.visible(query.device, window) if isinstance(layout, Layout) else layout
    if mask is not None:
        # Fewer queries than keys: they are the last tokens (keys of the first ones came from a cache).
        mask = mask[..., -query.shape[2] :, :]
    kernel = _reference if name == "reference" else _sdpa
    return kernel(query, key, value, mask, scale, softcap)


def _choose(query: Tensor, layout: Mask) -> str:
    if query.device.type != "cuda" or not isinstance(layout, Layout) or layout.length <= DENSE_LENGTH:
        return "sdpa"
    half = query.dtype in (torch.float16, torch.bfloat16)
    return "flash" if half and _flash_installed() and layout.cu_seqlens() is not None else "flex"


def _reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """The formula, one contiguous head at a time, since batched products may sum in another order."""
    precise = torch.promote_types(query.dtype, torch.float32)
    shared, outs = query.shape[1] // key.shape[1], []
    for head in range(query.shape[1]):
        q = query[:, head].to(precise).contiguous()
        k, v = (part[:, head // shared].to(precise).contiguous() for part in (key, value))
        scores = torch.einsum("bnd,bmd->bnm", q, k) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        outs.append(torch.einsum("bnm,bmd->bnd", scores.softmax(dim=-1), v))
    return torch.stack(outs, dim=1).to(query.dtype)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    batch, heads, length, width = query.shape
    shared = heads // key.shape[1]
    if mask is not None and mask.dim() == 3:
        mask = mask[0] if mask.shape[0] == 1 else mask[:, None]
    if shared > 1:  # fold the queries of a key head into one long query, without copies
        query = query.reshape(batch, key.shape[1], shared * length, width)
        if mask is not None:
            mask = torch.cat([mask] * shared, dim=-2)
    if softcap is not None or (query.device.type == "cpu" and query.dtype == torch.bfloat16):
        out = _attend_plainly(query, key, value, mask, scale, softcap)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, length, width)


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attention by matrix products.

    The fused kernel has no softcap, and on a CPU it computes bf16 in fp32 and is slower with gradients.
    """
    groups, bias = value.shape[:2], query.new_zeros(1, 1)
    if (
        mask is not None and mask.dim() == 2 and softcap is None
    ):  # one mask for all heads: fused into the product
        bias, mask = query.new_zeros(mask.shape).masked_fill(~mask, float("-inf")), None
    query, key_t = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(bias, query, key_t, alpha=scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.unflatten(0, groups).masked_fill(~mask, float("-inf")).flatten(0, 1)
    return (scores.softmax(dim=-1, dtype=query.dtype) @ value.flatten(0, 1)).unflatten(0, groups)


def _flex(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, softcap: float | None
) -> Tensor:
    if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        raise ConfigError("attention=flex cannot train on a CPU; use attention=auto.")
    return _flex_function(query.device.type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap),
        block_mask=layout.block_mask(query.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


@cache
def _flex_function(device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention)  # type: ignore[return-value]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, softcap: float | None
) -> Tensor:
    starts = layout.cu_seqlens()
    if starts is None or query.device.type != "cuda":
        raise ConfigError(
            "attention=flash supports causal documents in whole sequences on CUDA (mesh.cp=1) only; use "
            "attention=flex or attention=auto."
        )
    from flash_attn import flash_attn_varlen_func

    batch, longest = query.shape[0], int(starts.diff().max())
    if layout.document.shape[0] < batch:  # one row for the whole batch
        offsets = torch.arange(batch, dtype=torch.int32)[:, None] * layout.length
        # flash-attn sees the batch as one long sequence; the starts of one row repeat with its length as
        # offset.
        starts = torch.cat([(starts[:-1] + offsets).flatten(), starts[-1:] * batch])
    starts = starts.to(query.device, non_blocking=True)
    q, k, v = (rearrange(part, "b k n d -> (b n) k d") for part in (query, key, value))
    out = flash_attn_varlen_func(
        q, k, v, starts, starts, longest, longest, softmax_scale=scale, causal=True, softcap=softcap or 0.0
    )
    return rearrange(out, "(b n) k d -> b k n d", b=batch)


@cache
def _flash_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


# ---- transformers --------------------------------------------------------------------------------------


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device, window: int | None = None
) -> Bool[Tensor, "n m"] | None:
    """Return the causal mask of queries at the last positions of the keys; None if one query sees them all.

    `window` is the number of last positions that a query attends to; None is all.
    """
    if num_queries == 1 and window is None:
        return None
    positions = torch.arange(num_keys, device=device)
    queries = positions[num_keys - num_queries :, None]
    mask = positions[None, :] <= queries
    return mask if window is None else mask & (positions[None, :] > queries - window)


def _backbone_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention for transformers, with the layout that was passed to `base_model(..., layout=...)`.

    Without a layout the queries are the last positions of one causal sequence.
    """
    longest = key.shape[2] if layout is None else layout.longest
    # A window that no sequence exceeds would only select slower kernels for the same result.
    window = sliding_window if sliding_window is not None and longest > sliding_window else None
    if dropout:
        raise ConfigError(f"The backbone's attention_dropout is {dropout}; only 0 is supported.")
    query, key = query.to(value.dtype), key.to(value.dtype)  # norms and rotary embeddings may have upcast
    if layout is None:
        mask = causal_mask(query.shape[2], key.shape[2], query.device, window)
        out = attend(query, key, value, mask, scaling, softcap)
    else:
        out = attend(query, key, value, layout, scaling, softcap, window)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _backbone_attention)
# The mask follows from the layout or from the two lengths: sequences are never padded in front.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
