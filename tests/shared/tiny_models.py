"""Fixtures of all tests: a tiny model with random weights, its tokenizer, and a server of it.

The package is imported where a fixture needs it: long tests run again when a file changes that they import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from worldmodel.config import ImageSize, WorldModelConfig
    from worldmodel.models.world_model import WorldModel


def tiny_config(image_size: ImageSize = 32) -> WorldModelConfig:
    """A model that is whole, and small enough to run hundreds of times in a test."""
    from worldmodel.config import (
        ActionConfig,
        BackboneConfig,
        CodecConfig,
        GeneratorConfig,
        StateConfig,
        VisionConfig,
        WorldModelConfig,
    )

    return WorldModelConfig(
        codec=CodecConfig(image_size=image_size, latent_channels=4, widths=(8, 16), num_blocks=2),
        backbone=BackboneConfig(
            architecture={
                "model_type": "qwen3",
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": True,
            },
            vocab_size=320,
        ),
        vision=VisionConfig(width=32, num_blocks=1),
        action=ActionConfig(text={"max_tokens": 64}, keys=("left", "right"), vector=3),
        state=StateConfig(width=32, num_layers=1, num_heads=2),
        generator=GeneratorConfig(width=48, num_layers=2, num_heads=3),
    )


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of tests that `make gpu-check` runs on a GPU (`-m gpu`): CUDA where there is one."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The shapes world's tokenizer, learned once."""
    from worldmodel.config import DataConfig, SourceConfig, TrainConfig
    from worldmodel.train import tokenizer as tokenizers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "NUM_DOCUMENTS", 400)
        made = tokenizers.build_tokenizer(
            TrainConfig(model=tiny_config(), data=DataConfig({"shapes": SourceConfig("shapes")}))
        )
    assert made is not None
    return made


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of that tokenizer, for training runs."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def make_model(tokenizer: PreTrainedTokenizerBase) -> Callable[..., WorldModel]:
    """Makes tiny models whose weights are all random: none of the zeros that training starts from."""
    import torch

    from worldmodel.models.world_model import WorldModel

    def make(seed: int = 0, image_size: ImageSize = 32, **parts: Any) -> WorldModel:
        torch.manual_seed(seed)
        model = WorldModel.from_config(replace(tiny_config(image_size), **parts), tokenizer)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.3 * parameter.shape[-1] ** -0.5)
            model.codec.latent_mean.normal_(std=0.1)
            model.codec.latent_std.uniform_(0.5, 1.5)
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A tiny model; tests must not change it."""
    return make_model()


@pytest.fixture(scope="session")
def world(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A tiny model that takes every kind of action; tests must not change it."""
    from steering import ALL

    return make_model(action=ALL)


@pytest.fixture(scope="session")
def model_folder(model: WorldModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, saved; tests that damage it copy it first."""
    import torch

    return model.save_pretrained(tmp_path_factory.mktemp("models") / "tiny", dtype=torch.float32)


@pytest.fixture(scope="session")
def image() -> np.ndarray:
    """An image with structure in it, uint8 `[32, 32, 3]`."""
    return np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)


@pytest.fixture(scope="session")
def listening() -> Callable[[Any], AbstractContextManager[str]]:
    """Serves an application on a socket of this machine; yields its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: openworldmodel[serve]")

    @contextmanager
    def listen(app: Any) -> Iterator[str]:
        server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="critical"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server ended before it started"
                thread.join(0.05)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)

    return listen


@pytest.fixture(scope="module")
def serve(
    model: WorldModel,
    listening: Callable[[Any], AbstractContextManager[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., str]]:
    """Serves a model, by default the tiny one, until the module's tests end; returns the address.

    Further arguments are those of `ServerConfig`.
    """
    from worldmodel.serving.app import create_app
    from worldmodel.serving.settings import ServerConfig
    from worldmodel.serving.worlds.service import WorldService

    with ExitStack() as servers:

        def start(served: WorldModel = model, **settings: Any) -> str:
            config = ServerConfig("tiny", tmp_path_factory.mktemp("data"), **settings)
            return servers.enter_context(listening(create_app(WorldService(served), config)))

        yield start
