"""Learn to play MiniGrid's DoorKey inside a learned world, then play the real game.

    pip install "openworldmodel[gym,data,rl]" minigrid
    python imagination.py

PPO takes no step in the real game: its episodes begin with recorded frames, and go on in the shipped model.
`--model-free STEPS` trains the same learner in the real game for comparison, `--plans N` plans N episodes.
"""

import argparse
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

import worldmodel.cli
from worldmodel import WorldModel
from worldmodel.data.argument import read_source
from worldmodel.data.sources import open_source
from worldmodel.env import RecordedStarts, WorldVectorEnv
from worldmodel.env.sb3 import StableBaselinesEnv
from worldmodel.games.minigrid_judge import MiniGridJudge
from worldmodel.planning import ModelSimulator, PlanSettings, Return, action_set, environment
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.settings import EnvironmentSettings

GAME, SIZE, CELL = "minigrid:MiniGrid-DoorKey-6x6-v0", 48, 8
RECORD = [GAME, "--size", str(SIZE), "--max-steps", "60", "--policy", "worldmodel.games.minigrid:explore"]
FIRST_SEED = 10_000
"""Seeds of the episodes that are measured begin here."""
ROLLOUT = 1024
"""Steps of all environments together between two updates of the policy."""
JUDGE = MiniGridJudge()
Board = bytes
DRAWN: dict[bytes, np.ndarray] = {}
"""Pictures of boards by their content, of all games."""
MAX_DRAWN = 100_000


class Cells(BaseFeaturesExtractor):
    """Features of a board: every cell by itself, then each with its neighbours."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__(space, 128)
        channels, height, width = space.shape
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 32, CELL, CELL),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * (height // CELL) * (width // CELL), 128),
            torch.nn.ReLU(),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations)


class Game(gymnasium.Env[np.ndarray, int]):
    """The real game, seen as it was recorded: a picture of the whole board.

    Without a seed, episodes begin with any board but the `excluded` ones.
    """

    def __init__(self, excluded: Collection[Board] = ()) -> None:
        self.played = EnvironmentEpisodes(EnvironmentSettings(GAME, size=SIZE))
        self.excluded = excluded
        self.action_space: Any = self.played.env.action_space
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.played.env.reset(seed=seed)
        while board_of(self.frame()) in self.excluded:
            self.played.env.reset()
        return self.frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, _ = self.played.env.step(action)
        return self.frame(), float(reward), terminated, truncated, {}

    def frame(self) -> np.ndarray:
        """Draw the board; a picture that was drawn before is looked up, which takes a tenth of the time."""
        game: Any = self.played.env.unwrapped
        state = game.grid.encode().tobytes() + bytes([*map(int, game.agent_pos), int(game.agent_dir)])
        if state not in DRAWN:
            if len(DRAWN) == MAX_DRAWN:
                DRAWN.clear()
            DRAWN[state] = self.played.frame(self.played.env, None)
        return DRAWN[state]


def board_of(frame: np.ndarray) -> Board:
    """Return what a frame shows, cell by cell."""
    return JUDGE.read(frame).tobytes()


def recorded_boards(recordings: str, model: WorldModel) -> set[Board]:
    """Return the boards that recorded episodes begin with."""
    data = read_source(recordings)
    settings = replace(data.sources["lerobot"], split="all")
    source: Any = open_source("lerobot", replace(data, sources={"lerobot": settings}), model.config)
    return {board_of(source.at(index).read_rounds(1)[0]) for index in range(source.size)}


def unseen(boards: set[Board]) -> Iterator[tuple[int, Board]]:
    """Yield seeds of the game with the boards that they begin with, which are none of those given."""
    game = Game()
    for seed in count(FIRST_SEED):
        board = board_of(game.reset(seed=seed)[0])
        if board not in boards:
            yield seed, board


def imagined(model: WorldModel, recordings: str, num_envs: int) -> VecEnv:
    """Return worlds of the model whose episodes begin with recorded frames, at random times."""
    starts = RecordedStarts(recordings, model.config)
    worlds = WorldVectorEnv(
        model, num_envs, start=starts, actions="key", max_episode_steps=40, autoreset_mode="SameStep"
    )
    return VecMonitor(StableBaselinesEnv(worlds))


def learner(envs: VecEnv, seed: int) -> PPO:
    """Return PPO with the settings of all runs."""
    return PPO(
        "CnnPolicy",
        envs,
        learning_rate=5e-4,
        n_steps=ROLLOUT // envs.num_envs,
        batch_size=256,
        n_epochs=6,
        ent_coef=0.01,
        policy_kwargs={"features_extractor_class": Cells, "net_arch": []},
        seed=seed,
        device="cpu",
    )


def play(seeds: Sequence[int], choose: Callable[[np.ndarray], int]) -> list[float]:
    """Play an episode of the real game with each seed; return the returns, 0 to 1."""
    game, returns = Game(), []
    for seed in seeds:
        (frame, _), total, done = game.reset(seed=seed), 0.0, False
        while not done:
            frame, reward, terminated, truncated, _ = game.step(choose(frame))
            total, done = total + reward, terminated or truncated
        returns.append(total)
    return returns


def plan(model: WorldModel, seeds: Sequence[int], truly: bool) -> list[float]:
    """Play episodes by plans, the shortest ways to a reward: in the game itself (`truly`) or the model."""
    played = EnvironmentEpisodes(EnvironmentSettings(GAME, max_steps=360, size=SIZE))
    simulator: Any = environment.EnvironmentSimulator(played) if truly else ModelSimulator(model)
    settings = PlanSettings("search", horizon=24, candidates=256, until=0.5)
    goal, actions = Return(), action_set(model.config)
    attempts = (environment.control(played, seed, simulator, goal, actions, settings) for seed in seeds)
    return [attempt.reward for attempt in attempts]


def report(name: str, returns: Sequence[float]) -> None:
    """Print a row of the table."""
    error, solved = np.std(returns) / len(returns) ** 0.5, sum(each > 0 for each in returns)
    print(f"{name:42s} {np.mean(returns):.3f} +- {error:.3f}   solved {solved} of {len(returns)}", flush=True)


def main() -> None:
    args = arguments()
    model = WorldModel.from_pretrained(args.model)
    # A board shows all that its future depends on, so earlier rounds need not be remembered.
    model.config = replace(model.config, history_rounds=0)
    recordings = f"lerobot:{args.recordings}"
    if not args.recordings.exists():
        worldmodel.cli.main(
            ["record", *RECORD, "--out", str(args.recordings), "--episodes", str(args.record)]
        )
    boards = recorded_boards(recordings, model)
    seeds, excluded = zip(*islice(unseen(boards), args.episodes), strict=True)
    rng = np.random.default_rng(0)
    report("random actions", play(seeds, lambda frame: int(rng.integers(7))))
    if args.plans:
        report("planned in the game itself", plan(model, seeds[: args.plans], truly=True))
        report("planned in the model", plan(model, seeds[: args.plans], truly=False))

    def learn(name: str, agent: PPO, budgets: Sequence[int]) -> None:
        for steps in budgets:
            agent.learn(steps - agent.num_timesteps, reset_num_timesteps=False)
            report(
                f"{name}, {agent.num_timesteps:,} steps",
                play(seeds, lambda frame: int(agent.predict(frame)[0])),
            )

    if args.steps:
        learn("PPO in the model", learner(imagined(model, recordings, args.num_envs), args.seed), args.steps)
    if args.model_free:
        games = DummyVecEnv([lambda: Monitor(Game({*excluded}))] * 8)
        learn("PPO in the real game", learner(games, args.seed), args.model_free)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="minigrid-doorkey", help="a model with rewards and ends")
    add("--recordings", type=Path, default="recordings", help="its recording, made if it is not there")
    add("--record", type=int, default=2400, help="episodes of a new recording")
    add("--steps", type=int, nargs="*", default=[20_000], help="measure after these steps in the model")
    add("--model-free", type=int, nargs="*", default=[], help="measure after these steps in the real game")
    add("--num-envs", type=int, default=32, help="worlds that run as one batch")
    add("--plans", type=int, default=0, help="episodes to play by plans")
    add("--episodes", type=int, default=100, help="real episodes to measure a policy on")
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
