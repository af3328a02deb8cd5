"""The backbone: an unmodified causal language model of transformers, fed with embeddings."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from worldmodel.config import BackboneConfig
from worldmodel.errors import ConfigError, ModelError, WorldModelError
from worldmodel.models import attention
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mesh import SequenceGroup

MODEL_TYPES = ("gemma", "gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Decoder families that may be loaded: known code, no remote code, served by vLLM as they are."""


class Backbone(nn.Module):
    """A decoder language model and its tokenizer.

    The model sees one plain causal sequence of embeddings, so any engine that serves such models (and
    caches their keys and values) can stand in for it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.sequence = SequenceGroup()
        """Processes that share a sequence in training: each takes a piece."""

    @classmethod
    def from_config(
        cls, config: BackboneConfig, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "Backbone":
        """Load `config.pretrained`, or build `config.architecture` with random weights.

        Raises:
            ConfigError: the architecture is not one of `MODEL_TYPES`, or a tokenizer is missing.
        """
        if config.pretrained:
            return cls.from_pretrained(config.pretrained)
        if tokenizer is None:
            raise ConfigError(
                "A backbone with random weights needs a tokenizer; set backbone.pretrained instead."
            )
        architecture = dict(config.architecture)
        model_type = architecture.pop("model_type", None)
        _check_model_type(model_type)
        width = architecture.get("hidden_size", 256)
        # Token vectors then have unit norm, and logits through tied embeddings unit variance.
        architecture.setdefault("initializer_range", width**-0.5)
        hf_config = AutoConfig.for_model(
            model_type,
            **architecture,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        return cls(AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention.NAME), tokenizer)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "Backbone":
        """Load model and tokenizer from a folder that transformers wrote.

        Raises:
            ModelError: the folder holds no readable safetensors checkpoint of an allowed family.
        """
        if not Path(folder).is_dir():  # transformers would look for it on the network
            raise ModelError(
                f"There is no backbone folder {str(folder)!r}; pass one that transformers wrote."
            )
        try:
            # Before any class of transformers sees the file.
            _check_model_type(
                json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["model_type"]
            )
            model, report = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation=attention.NAME,
                dtype=torch.float32,
                **kwargs,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **kwargs)
        except WorldModelError:
            raise
        except (OSError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"The backbone in {str(folder)!r} cannot be loaded: {reason}") from None
        # transformers fills gaps with random weights and only warns.
        gaps = sorted({*report["missing_keys"], *report["unexpected_keys"]})
        gaps += [str(entry[0]) for entry in report["mismatched_keys"]]
        if gaps:
            raise ModelError(f"The backbone in {str(folder)!r} does not fit its config.json at {gaps[0]!r}.")
        return cls(model, tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer as transformers reads them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    @property
    def width(self) -> int:
        """Width of hidden states and embeddings."""
        return self.model.config.hidden_size

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a text without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def end(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)  # type: ignore[arg-type]

    def text(self, ids: list[int]) -> str:
        """Put tokens back into words."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def embed(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        """Look up word embeddings."""
        return self.model.get_input_embeddings()(ids)

    def new_cache(self) -> DynamicCache:
        """Return an empty key-value cache for `forward`."""
        return DynamicCache(config=self.model.config)

    def forward(
        self,
        embeds: Float[Tensor, "b n d"],
        cache: DynamicCache | None = None,
        layout: Layout | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return the hidden states (after the last norm) of new positions.

        `cache` grows by them. Without one, `layout` says which texts lie side by side in a row; None is one
        text a row.
        """
        if cache is not None:
            output = self.model.base_model(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
            return output.last_hidden_state
        layout = layout or Layout.causal(embeds.shape[1])
        layout = layout.shard(self.sequence, balance=True)
        output = self.model.base_model(
            inputs_embeds=layout.take(embeds),
            position_ids=layout.take(layout.position).to(embeds.device),
            use_cache=False,
            layout=layout,
        )
        return layout.gather(output.last_hidden_state)

    def logits(self, hidden: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape v"]:
        """Score the vocabulary."""
        head = self.model.get_output_embeddings()
        assert head is not None, "a causal language model has an output layer"
        return head(hidden)

    @torch.no_grad()
    def decode_text(self, prefix: Float[Tensor, "b n d"], cache: DynamicCache, max_tokens: int) -> list[str]:
        """Greedily continue a prefix with text; `cache` is consumed."""
        embeds, tokens = prefix, []
        finished = torch.zeros(prefix.shape[0], dtype=torch.bool, device=prefix.device)
        for _ in range(max_tokens):
            token = self.logits(self(embeds, cache)[:, -1]).argmax(dim=-1).masked_fill(finished, self.end)
            finished = finished | (token == self.end)
            if finished.all():
                break
            tokens.append(token)
            embeds = self.embed(token[:, None])
        rows = torch.stack(tokens, dim=1).tolist() if tokens else [[] for _ in range(prefix.shape[0])]
        return [self.text(row) for row in rows]


def _check_model_type(model_type: str | None) -> None:
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"Backbone type {model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}."
        )
