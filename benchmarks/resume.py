"""Exactness of resumed training runs whose processes are killed at random.

Two processes train a small model to its end, or one with deterministic kernels where there is a single GPU.
The same run is then repeated, and random processes are killed with SIGKILL at random steps, every other time
while a checkpoint is written; torchrun restarts all of them. Every loss of every step, also of repeated ones,
and every byte of the finished model must be equal. Finally, the order of samples is compared between numbers
of processes and workers. Exits with 1 if anything differs.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer

from worldmodel import config as configs
from worldmodel.data import loader
from worldmodel.models.loading import model_folder
from worldmodel.models.world_model import WorldModel

NUM_PROCESSES = min(2, torch.cuda.device_count() or 2)
SMALL = configs.WorldModelConfig(
    codec=configs.CodecConfig(latent_channels=4, widths=(8, 16), num_blocks=2),
    backbone=configs.BackboneConfig(
        architecture={
            **configs.SMALL_DECODER,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "head_dim": 16,
        }
    ),
    vision=configs.VisionConfig(width=32, num_blocks=1),
    action=configs.ActionConfig(keys=configs.load("shapes_tiny").model.action.keys),
    state=configs.StateConfig(width=32, num_layers=1, num_heads=2),
    generator=configs.GeneratorConfig(width=48, num_layers=2, num_heads=3),
)


def settings(folder: Path, steps: int, seed: int) -> configs.TrainConfig:
    """Return a short training of two stages with everything a checkpoint has to hold."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder.resolve("shapes-tiny") / "backbone")
    start = WorldModel.from_config(SMALL, tokenizer).save_pretrained(folder / "start")
    state = configs.StageConfig(
        "state",
        steps=steps,
        batch_size=4,
        microbatch_size=1,
        rounds=1,
        warmup_steps=2,
        ema_decay=0.9,
        self_rollout=(0.5, 0.5),
        tasks={"rounds": 0.6, "describe": 0.4},
        train={"backbone": configs.TrainedConfig(), "adapters": configs.TrainedConfig()},
    )
    generator = configs.StageConfig(
        "generator",
        steps=4,
        batch_size=4,
        rounds=1,
        tasks={"rounds": 1.0},
        train={"generator": configs.TrainedConfig()},
    )
    return configs.TrainConfig(
        model=SMALL,
        stages={"state": state, "generator": generator},
        data=configs.DataConfig({"shapes": configs.SourceConfig("shapes")}),
        init_from=str(start),
        seed=seed,
        checkpoint_every=2,
        log_every=1,
        hang_timeout_s=120,
        deterministic=torch.cuda.is_available(),
    )


@contextmanager
def training(config: Path, run: Path, restarts: int, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training as a user does; what goes wrong in it ends the benchmark."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(NUM_PROCESSES), "--max-restarts", str(restarts)]
    command += ["-m", "worldmodel.train.finetune", str(config), f"run_dir={run}", *overrides]
    with run.with_suffix(".log").open("wb") as log:
        # Not from the current folder: a clone would hide the package that is installed.
        trainer = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONSAFEPATH": "1"})
    try:
        yield trainer
        if trainer.wait():
            sys.exit(run.with_suffix(".log").read_text()[-4000:])
    finally:
        trainer.terminate()


def lines(run: Path) -> list[dict]:
    """Read what a run has logged."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def losses(line: dict) -> dict[str, float]:
    """Keep of a line what must not depend on when it was made."""
    return {name: value for name, value in line.items() if "/" in name}


def kill_some(trainer: subprocess.Popen[bytes], run: Path, kills: int, chance: random.Random) -> list[dict]:
    """Kill random processes of a running training; returns what was killed, and when."""
    killed: list[dict] = []
    while len(killed) < kills and trainer.poll() is None:
        before, more = len(lines(run)), chance.randint(1, 5)
        writing = run / "checkpoints" / ".writing"
        wanted = len(killed) % 2 == 0
        while trainer.poll() is None and (
            len(lines(run)) < before + more or (wanted and not writing.exists())
        ):
            time.sleep(0.001 if wanted else 0.02)
        time.sleep(0 if wanted else chance.uniform(0, 0.5))
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children")
        ranks = [int(pid) for pid in children.read_text().split()] if trainer.poll() is None else []
        if len(ranks) == NUM_PROCESSES:
            rank = chance.randrange(NUM_PROCESSES)
            killed.append({"step": len(lines(run)), "rank": rank, "in_flight": writing.exists()})
            subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(ranks[rank])], check=False)
            print(
                f"  kill {len(killed):2d}: process {rank}, checkpoint in flight: {killed[-1]['in_flight']}",
                flush=True,
            )
    return killed


def differences(straight: Path, broken: Path) -> Iterator[str]:
    """Name what is not exactly the same in two runs."""
    expected = {(line["stage"], line["step"]): losses(line) for line in lines(straight)}
    seen = set()
    for line in lines(broken):
        place = (line["stage"], line["step"])
        seen.add(place)
        if losses(line) != expected[place]:
            yield f"losses of {place}: {losses(line)} instead of {expected[place]}"
    yield from (f"no step {place}" for place in sorted(expected.keys() - seen))
    for file in sorted((straight / "model").rglob("*.safetensors")):
        name = file.relative_to(straight)
        if file.read_bytes() != (broken / name).read_bytes():
            yield f"the bytes of {name}"


def sample_order(config: configs.TrainConfig, dp_size: int, num_workers: int, first_step: int) -> list[tuple]:
    """Return step, index and name of every sample that all processes together see."""
    stage = config.stages["state"]
    data = configs.DataConfig({"shapes": configs.SourceConfig("shapes")}, num_workers=num_workers)
    found = []
    for rank in range(dp_size):
        with loader.batches(data, config.model, stage, config.seed, first_step, rank, dp_size) as stream:
            for batch in itertools.chain.from_iterable(itertools.islice(stream, 4)):
                names = [episode.name for episode in batch.episodes]
                found += [(batch.step, index, name) for index, name in zip(batch.indices, names, strict=True)]
    return sorted(found)


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="processes to kill (default 20)")
    parser.add_argument(
        "--num-workers", type=int, default=1, help="data.num_workers of the killed run (default 1)"
    )
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = settings(folder, steps=4 + 4 * args.kills, seed=args.seed)
        file = folder / "config.yaml"
        file.write_text(json.dumps(configs.to_dict(config)))  # JSON is YAML
        straight, broken = folder / "straight", folder / "broken"
        with training(file, straight, 0):
            pass
        with training(file, broken, args.kills, f"data.num_workers={args.num_workers}") as trainer:
            killed = kill_some(trainer, broken, args.kills, random.Random(args.seed))
        found = list(differences(straight, broken))
        done, twice = len(lines(straight)), len(lines(broken)) - len(lines(straight))
        orders = {
            (dp_size, workers): sample_order(config, dp_size, workers, first_step=6)
            for dp_size, workers in ((1, 0), (2, 0), (3, 0), (1, 2))
        }
        found += [f"order of samples: {of}" for of, order in orders.items() if order != orders[1, 0]]
    in_flight = sum(kill["in_flight"] for kill in killed)
    print(f"processes killed        {len(killed)} ({in_flight} with a checkpoint in flight)")
    print(f"steps                   {done}, and {twice} of them once more after a restart")
    print(f"orders of samples       {len(orders)} (processes, workers): {', '.join(map(str, orders))}")
    print(f"differences             {len(found)}")
    for difference in found[:10]:
        print(f"  {difference}")
    return int(bool(found) or len(killed) < args.kills)


if __name__ == "__main__":
    sys.exit(main())
