"""The backbone: an unmodified causal language model of transformers, fed with embeddings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from worldmodel.batch import to_device
from worldmodel.config import SMALL_DECODER, BackboneConfig
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.models.backbone.families import VISION_LANGUAGE, check_model_type
from worldmodel.models.backbone.reference import Reference
from worldmodel.models.layers import attention
from worldmodel.models.loading import base_models, pretrained
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mesh import SequenceGroup

LANGUAGE_WEIGHTS = {
    "model.language_model.": "model.",
    "model.visual.": None,
    "model.": "model.",
    "lm_head.": "lm_head.",
}


class Backbone(nn.Module):
    """A decoder language model and its tokenizer.

    Its input is one plain causal sequence of embeddings, so any engine that serves such models and caches
    their keys and values can replace it.

    Raises:
        ModelError: the tokenizer has no token for the end of a text.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"The tokenizer of {tokenizer.name_or_path or 'the backbone'!r} has no eos_token, which ends "
                "texts; name one of its tokens in tokenizer_config.json."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.sequence = SequenceGroup()
        """Processes that share a sequence in training."""
        self.reference: Reference | None = None
        """The base model and what was added to it, if nothing else of it was trained."""

    @classmethod
    def from_config(
        cls, config: BackboneConfig, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "Backbone":
        """Load `config.pretrained`, or build `config.architecture` with random weights.

        Raises:
            ConfigError: the architecture is not of a family that is supported, or a tokenizer is missing.
        """
        if config.pretrained:
            return cls.from_pretrained(config.pretrained, config.revision, config.dtype, config.num_layers)
        architecture, tokenizer = _architecture(config, tokenizer)
        return cls(_random(architecture, config.dtype), tokenizer)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, revision: str | None = None, dtype: str = "fp32", num_layers: int = 0
    ) -> "Backbone":
        """Load the first `num_layers` layers of a model (0: all), and its tokenizer.

        `name` is a folder of transformers, a GGUF file, a base model that was downloaded, or a commit of a
        model on the Hub. Of a model in `VISION_LANGUAGE` only the language model is loaded. For a single
        sequence the axes of its multimodal rotary positions are equal, so they reduce to plain ones.

        Raises:
            ModelError: the folder holds no readable safetensors checkpoint of an allowed family.
            ConfigError: the family is not allowed, or the model has fewer layers.
        """
        weights_dtype = pretrained.dtype_of(dtype)
        folder = _folder(name, revision)
        config, model_type = _read_config(folder)
        multimodal = model_type in VISION_LANGUAGE
        if not multimodal and not num_layers:
            model = pretrained.load_model(AutoModelForCausalLM, folder, weights_dtype, attention.NAME)
            return cls(model, _tokenizer(folder))
        # Prefixes of weights and what replaces them; None leaves the weights in their file, unread.
        renaming: dict[str, str | None] = LANGUAGE_WEIGHTS if multimodal else {"": ""}
        if num_layers:
            prefix = "model.language_model.layers." if multimodal else "model.layers."
            left_out = range(num_layers, config.num_hidden_layers)
            renaming = {f"{prefix}{layer}.": None for layer in left_out} | renaming
            config = _first_layers(config, num_layers)
        model_class = VISION_LANGUAGE[model_type] if multimodal else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = pretrained.load_model(model_class, folder, weights_dtype, attention.NAME, config, renaming)
        return cls(model, _tokenizer(folder))

    def save_pretrained(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the model and the tokenizer in the format of transformers, or the `reference`, if any.

        `dtype` is the data type of the weights in the files; None keeps the model's.
        """
        if self.reference is not None:
            self.reference.save(folder, dtype)
            return
        self.model.save_pretrained(folder, state_dict=pretrained.cast(self.model.state_dict(), dtype))
        self.tokenizer.save_pretrained(folder)

    @property
    def width(self) -> int:
        """Width of hidden states and embeddings."""
        return self.model.config.hidden_size

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a text without special tokens.

        Raises:
            InputError: the text contains an unpaired surrogate, which UTF-8 cannot encode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError("The text contains an unpaired surrogate; remove it.") from None
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def end(self) -> int:
        """Id of the end-of-text token."""
        return int(self.tokenizer.eos_token_id)  # type: ignore[arg-type]

    def text(self, ids: list[int]) -> str:
        """Decode token ids without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def embed(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        """Look up word embeddings."""
        return self.model.get_input_embeddings()(ids)

    def position_bytes(self, dtype: torch.dtype) -> int:
        """Return the memory of the keys and values of one position."""
        layers, heads, width = self.cache_shape
        return 2 * layers * heads * width * dtype.itemsize

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads, and width of a head, of cached keys and values."""
        config: Any = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers, heads, width

    def new_cache(self) -> DynamicCache:
        """Return an empty key-value cache for `forward`.

        It keeps the keys of all positions, also in layers with a sliding window: histories share prefixes.
        """
        return DynamicCache()

    def forward(
        self,
        embeds: Float[Tensor, "b n d"],
        cache: DynamicCache | None = None,
        layout: Layout | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return the hidden states (after the last norm) of new positions.

        They are appended to `cache`. Without a cache, `layout` describes the documents packed into each row;
        None is one document per row. The states have the dtype of the embeddings.
        """
        given, embeds = embeds.dtype, self._to_weight_dtype(embeds)
        if cache is not None:
            # `base_model` stops before the output layer: a round needs hidden states, not logits of a
            # vocabulary.
            output = self.model.base_model(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
            return self._from_weight_dtype(output.last_hidden_state, given)
        # `layout.take` and `gather` do nothing in one process; with shards each has its tokens in between.
        layout = layout or Layout.causal(embeds.shape[1])
        layout = layout.shard(self.sequence, balance=True)
        output = self.model.base_model(
            inputs_embeds=layout.take(embeds),
            position_ids=to_device(layout.take(layout.position), embeds.device),
            use_cache=False,
            layout=layout,
        )
        return layout.gather(self._from_weight_dtype(output.last_hidden_state, given))

    def predict_states(
        self,
        embeds: Float[Tensor, "b n d"],
        ends: Int[Tensor, "b r"],
        num_queries: int,
        cache: DynamicCache | None = None,
    ) -> Float[Tensor, "b r q d"]:
        """Return the hidden states at the `num_queries` positions before each end of a round.

        Ends count from the first position of `embeds`, which follow those in the cache.
        """
        hidden = self(embeds, cache)
        # Hidden states of the queries are the predicted state: rounds end with them, `[b, r, q]`.
        positions = to_device(ends[:, :, None] + torch.arange(-num_queries, 0), hidden.device)
        return hidden[torch.arange(len(embeds), device=hidden.device)[:, None, None], positions]

    def text_states(self, texts: Sequence[Int[Tensor, " _"]], num_positions: int) -> Float[Tensor, "b n d"]:
        """Return the hidden states of texts and of the end after each, then zeros."""
        end = torch.tensor([self.end])
        ids = [torch.cat([text, to_device(end, text.device)]) for text in texts]
        counts = [len(each) for each in ids]
        words = list(self.embed(torch.cat(ids)).split(counts))
        hidden = self(nn.utils.rnn.pad_sequence(words, batch_first=True))
        lengths = to_device(torch.tensor(counts), hidden.device)
        written = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
        return F.pad(hidden * written[..., None], (0, 0, 0, num_positions - hidden.shape[1]))

    def logits(self, hidden: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape v"]:
        """Return the logits of the vocabulary."""
        head, config = self.model.get_output_embeddings(), self.model.config
        assert head is not None, "a causal language model has an output layer"
        scores = head(self._to_weight_dtype(hidden))
        # Families that rescale their logits: Cohere, Granite, Gemma 2.
        if (scale := getattr(config, "logit_scale", None)) is not None:
            scores = scores * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            scores = scores / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            scores = cap * torch.tanh(scores / cap)
        return scores

    def _to_weight_dtype(self, x: Tensor) -> Tensor:
        """Return `x` in bf16 if the weights are in bf16; otherwise autocast decides."""
        return x.to(torch.bfloat16) if self.model.dtype == torch.bfloat16 else x

    def _from_weight_dtype(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype) if self.model.dtype == torch.bfloat16 else x

    @torch.no_grad()
    def decode_text(self, prefix: Float[Tensor, "b n d"], cache: DynamicCache, max_tokens: int) -> list[str]:
        """Greedily continue a prefix with text; `cache` is consumed."""
        embeds, tokens = prefix, []
        finished = torch.zeros(prefix.shape[0], dtype=torch.bool, device=prefix.device)
        for _ in range(max_tokens):
            # Rows that have ended go on with the end token, which `text` drops, until all have ended.
            token = self.logits(self(embeds, cache)[:, -1]).argmax(dim=-1).masked_fill(finished, self.end)
            finished = finished | (token == self.end)
            if finished.all():
                break
            tokens.append(token)
            embeds = self.embed(token[:, None])
        rows = torch.stack(tokens, dim=1).tolist() if tokens else [[] for _ in range(prefix.shape[0])]
        return [self.text(row) for row in rows]

    @torch.no_grad()
    def log_likelihoods(
        self, sequences: Sequence[tuple[Float[Tensor, "_ d"], Int[Tensor, " _"]]]
    ) -> list[float]:
        """Return the mean log-likelihood of each sequence's labels, in nats per token.

        A sequence has embeddings and the token that each position should predict, or -100.
        """
        pad = nn.utils.rnn.pad_sequence
        hidden = self(pad([embeds for embeds, _ in sequences], batch_first=True))
        labels = pad([labels for _, labels in sequences], batch_first=True, padding_value=-100)
        labels = to_device(labels, hidden.device)
        rows = []
        for states, wanted in zip(hidden, labels, strict=True):
            scores = self.logits(states[wanted >= 0]).float().log_softmax(dim=-1)
            rows.append(float(scores.gather(1, wanted[wanted >= 0, None]).mean()))
        return rows


def _architecture(
    config: BackboneConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Return the configuration and the tokenizer of a backbone with random weights."""
    if tokenizer is None:
        raise ConfigError(
            "A backbone with random weights needs a tokenizer; set backbone.pretrained instead."
        )
    chosen = config.architecture or SMALL_DECODER
    check_model_type(chosen.get("model_type"))
    size = chosen.get("vocab_size", len(tokenizer))
    if size < len(tokenizer):
        raise ConfigError(
            f"backbone.architecture.vocab_size is {size}, but the tokenizer has {len(tokenizer)} tokens; "
            "leave it out, or lower backbone.vocab_size."
        )
    # Token embeddings get unit norm, and logits of tied embeddings unit variance.
    scale = chosen.get("hidden_size", 256) ** -0.5
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    values = {"initializer_range": scale, **chosen, **special, "bos_token_id": None, "vocab_size": size}
    return pretrained.build_config(values, "backbone"), tokenizer


def _random(architecture: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        architecture, attn_implementation=attention.NAME, dtype=pretrained.dtype_of(dtype)
    )


def _folder(name: str | Path, revision: str | None) -> Path:
    return base_models.find(name) or pretrained.resolve_folder(name, revision, "backbone")


def _first_layers(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """Return the configuration of a model's first layers."""
    if num_layers > config.num_hidden_layers:
        raise ConfigError(
            f"backbone.num_layers is {num_layers}, but the model has {config.num_hidden_layers} layers."
        )
    values: dict[str, Any] = config.to_dict() | {"num_hidden_layers": num_layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:num_layers]
    return type(config).from_dict(values)


def _read_config(folder: Path) -> tuple[PreTrainedConfig, str]:
    """Return the config of a language model, or of that in a vision-language model, and the model type."""
    model_type = check_model_type(pretrained.read_json(folder).get("model_type"), VISION_LANGUAGE)
    whole = pretrained.read_config(folder)
    if model_type not in VISION_LANGUAGE:
        return whole, model_type
    text = whole.get_text_config()
    # transformers nests the language model's settings in the vision-language model's, without what the
    # outer one shares with it (tied embeddings). Multimodal rotary positions (`mrope…`) are dropped: for a
    # single sequence their three axes are equal.
    values = text.to_dict()
    for name in ("model_type", "architectures", "dtype"):
        values.pop(name, None)
    rope = text.rope_parameters or {}
    values["rope_parameters"] = {name: x for name, x in rope.items() if not name.startswith("mrope")}
    values["tie_word_embeddings"] = whole.tie_word_embeddings
    return VISION_LANGUAGE[model_type].config_class(**values), model_type


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except pretrained.LOAD_ERRORS as error:
        reason = pretrained.first_line(error)
        raise ModelError(f"The tokenizer in {str(folder)!r} cannot be loaded: {reason}") from None
