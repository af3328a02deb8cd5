"""Attention kernels against the formula, and layouts in the model families of transformers."""

import copy

import pytest
import torch
from einops import repeat
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from worldmodel.errors import ConfigError
from worldmodel.models.backbone.families import MODEL_TYPES
from worldmodel.models.layers import attention
from worldmodel.models.layers.attention import attend
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mask_rules import Kind

MIXED = Layout.rows(
    [
        [[(Kind.TEXT, 40), (Kind.FRAME, 50), (Kind.FRAME, 50)], [(Kind.FULL, 30)]],
        [[(Kind.TEXT, 70)], [(Kind.FULL, 20), (Kind.TEXT, 15)]],
    ]
)
LAYOUTS = {
    "mixed": MIXED,
    "frames": Layout.frames(torch.tensor([0, 1, 1, 2]), 36),
    "text": Layout.causal(131),
}


def formula(parts: list[Tensor], seen: Tensor, softcap: float | None = None) -> Tensor:
    """Attention in fp64, every query head with its own copy of the keys."""
    q, k, v = (part.double() for part in parts)
    k, v = (repeat(part, "b g m d -> b (g copies) m d", copies=q.shape[1] // k.shape[1]) for part in (k, v))
    scores = torch.einsum("bknd,bkmd->bknm", q, k) / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return torch.einsum("bknm,bkmd->bknd", scores.softmax(dim=-1), v)


def drawn(
    length: int,
    heads: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    torch.manual_seed(0)
    counts = heads[0], heads[1], heads[1]
    return [torch.randn(2, count, length, 16).to(device, dtype) for count in counts]


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "flex"])
def test_kernels_equal_the_formula(
    kernel: str, name: str, heads: tuple[int, int], softcap: float | None, device: torch.device
) -> None:
    layout = LAYOUTS[name]
    parts = drawn(layout.length, heads, device=device)
    with attention.using(kernel), torch.no_grad():
        out = attend(*parts, layout, softcap=softcap)
    assert out.dtype == torch.float32
    truth = formula(parts, layout.visible(device), softcap)
    close = 2e-6 if device.type == "cpu" else 2e-5  # a GPU's kernels sum in another order
    torch.testing.assert_close(out.double(), truth, atol=close, rtol=1e-5)


def gradient_error(kernel: str, parts: list[Tensor], layout: Layout, softcap: float | None) -> float:
    """Largest error of the gradients, relative to their norm."""
    parts = [part.requires_grad_() for part in parts]
    exact = [part.detach().double().requires_grad_() for part in parts]
    with attention.using(kernel):
        found = torch.autograd.grad(attend(*parts, layout, softcap=softcap).double().pow(2).sum(), parts)
    seen = layout.visible(parts[0].device)
    truth = torch.autograd.grad(formula(exact, seen, softcap).pow(2).sum(), exact)
    pairs = zip(found, truth, strict=True)
    return max(float((part.double() - other).norm() / other.norm()) for part, other in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_gradients_equal_the_formula(
    kernel: str, dtype: torch.dtype, bound: float, softcap: float | None, device: torch.device
) -> None:
    parts = drawn(MIXED.length, (6, 2), dtype, device)
    assert gradient_error(kernel, parts, MIXED, softcap) < bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex and flash train on CUDA only")
@pytest.mark.parametrize("heads", [(8, 8), (28, 4)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kernel", ["flex", "flash"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
def test_kernels_that_train_on_a_gpu_have_the_gradients_of_the_formula(
    kernel: str, name: str, heads: tuple[int, int], dtype: torch.dtype, bound: float, device: torch.device
) -> None:
    layout = LAYOUTS[name]
    if kernel == "flash":
        if not attention._flash_installed():
            pytest.skip("flash-attn is not installed")
        if layout.cu_seqlens() is None or dtype == torch.float32:
            pytest.skip("flash-attn computes causal documents in half precision")
    assert gradient_error(kernel, drawn(layout.length, heads, dtype, device), layout, None) < bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex is compiled on CUDA only")
def test_flex_is_not_compiled_again_for_another_mask(device: torch.device) -> None:
    def run(layout: Layout) -> int:
        attend(*(part.requires_grad_() for part in drawn(layout.length, (4, 2), device=device)), layout)
        return counters["stats"]["unique_graphs"]

    with attention.using("flex"):
        # The second length is compiled with lengths as variables.
        graphs = [run(Layout.packed([[length - 40, 40], [length]])) for length in (300, 400, 500, 700)]
        assert graphs[1] == graphs[2] == graphs[3]
        assert run(Layout.packed([[100, 200, 400], [650]])) == graphs[3]


def test_reference_kernel_computes_heads_independently() -> None:
    q, k, v = drawn(MIXED.length, (6, 2))
    with attention.using("reference"):
        whole = attend(q, k, v, MIXED)
        for head in range(6):
            one, group = slice(head, head + 1), slice(head // 3, head // 3 + 1)
            assert torch.equal(attend(q[:, one], k[:, group], v[:, group], MIXED), whole[:, one])


def test_fewer_queries_are_the_last_tokens() -> None:
    q, k, v = drawn(MIXED.length, (4, 2))
    torch.testing.assert_close(attend(q[:, :, -9:], k, v, MIXED), attend(q, k, v, MIXED)[:, :, -9:])


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "flex"])
def test_later_tokens_continue_from_the_keys_and_values_of_earlier_ones(kernel: str) -> None:
    q, k, v = drawn(50, (4, 2))
    with attention.using(kernel), torch.no_grad():
        _, past = attention.attend_cached(*(part[:, :, :30] for part in (q, k, v)), Layout.unmasked(30))
        out, present = attention.attend_cached(
            *(part[:, :, 30:] for part in (q, k, v)), Layout.unmasked(20), past
        )
        whole = attend(q, k, v)
    assert torch.equal(torch.cat([past[0], present[0]], dim=2), k)
    torch.testing.assert_close(out, whole[:, :, 30:])


def test_padding_is_finite_and_has_no_influence() -> None:
    layout = Layout.packed([[9, 4], [5]])
    for kernel in ("reference", "sdpa"):
        for dtype in (torch.float32, torch.bfloat16):
            parts = [part.requires_grad_() for part in drawn(13, (2, 2), dtype)]
            with attention.using(kernel):
                out = attend(*parts, layout)
            assert out.isfinite().all()
            for gradient in torch.autograd.grad(out[1, :, 5:].float().sum(), parts):
                assert gradient[1, :, 5:].isfinite().all()
                assert not gradient[0].any()
                assert not gradient[1, :, :5].any()


# The switch


def test_using_restores_the_kernel() -> None:
    parts = drawn(8, (2, 2), torch.bfloat16)
    before = attend(*parts)
    with attention.using("reference"):
        attention.use("sdpa")
    assert torch.equal(attend(*parts), before)


@pytest.mark.parametrize("name", ["fast", ""])
def test_unknown_kernel(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        attention.use(name)


@pytest.mark.skipif(attention._flash_installed(), reason="flash-attn is installed")
def test_flash_names_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"worldmodel\[flash\]"):
        attention.use("flash")


def test_flex_cannot_train_on_a_cpu() -> None:
    parts = [part.requires_grad_() for part in drawn(8, (2, 2))]
    with attention.using("flex"), pytest.raises(ConfigError, match="attention=auto"):
        attend(*parts, Layout.causal(8))


# transformers


def family(model_type: str, **settings: object) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A tiny model of a family with our attention, and the same with transformers' own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=20,
        pad_token_id=0,
        initializer_range=0.5,
        **settings,
    )
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.NAME)
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    theirs.load_state_dict(ours.state_dict())
    return ours.double().eval().base_model, theirs.double().eval().base_model


@torch.no_grad()
def difference(ours: torch.nn.Module, theirs: torch.nn.Module, lengths: list[int]) -> float:
    """Largest difference between texts packed into one row, and each text alone."""
    embeds = torch.randn(1, sum(lengths), 32, dtype=torch.float64)
    layout = Layout.packed([lengths])
    packed = ours(inputs_embeds=embeds, position_ids=layout.position, layout=layout, use_cache=False)
    alone = [theirs(inputs_embeds=text).last_hidden_state for text in embeds.split(lengths, dim=1)]
    return (packed.last_hidden_state - torch.cat(alone, dim=1)).abs().max().item()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_family_uses_the_layout(model_type: str) -> None:
    assert difference(*family(model_type), [9, 14, 1, 6]) < 1e-5  # norms and rotary tables are fp32


def test_gemma2_softcap() -> None:
    ours, theirs = family("gemma2", attn_logit_softcapping=0.7)
    assert difference(ours, theirs, [9, 14]) < 1e-5
    _, uncapped = family("gemma2", attn_logit_softcapping=None)
    assert difference(ours, uncapped, [9, 14]) > 1e-3


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "cohere2", "olmo3", "mistral", "phi3"])
def test_sequence_longer_than_a_sliding_window(model_type: str) -> None:
    ours, theirs = family(model_type, sliding_window=14)
    assert difference(ours, theirs, [9, 14, 40, 15]) < 1e-5
    _, wider = family(model_type, sliding_window=16)
    assert difference(ours, wider, [9, 14]) < 1e-5
    assert difference(ours, wider, [40]) > 1e-4


def test_attention_dropout_is_not_supported() -> None:
    ours, _ = family("llama", attention_dropout=0.1)
    embeds = torch.randn(1, 4, 32, dtype=torch.float64)
    ours(inputs_embeds=embeds)
    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.1"):
        ours.train()(inputs_embeds=embeds)
