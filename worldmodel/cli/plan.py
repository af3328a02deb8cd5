"""`worldmodel plan`: search for actions in a model, and try them in the real environment."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from worldmodel.cli.environment import add_environment_options, open_environment
from worldmodel.cli.model import (
    add_base_option,
    add_device_option,
    check_files,
    check_model,
    check_observation,
    load_model,
)
from worldmodel.cli.parser import Parser, option, seed_number
from worldmodel.config.imports import import_callable
from worldmodel.errors import InputError

if TYPE_CHECKING:
    from worldmodel.models.world_model import WorldModel
    from worldmodel.planning import ActionSet, ModelSimulator, Objective, PlanSettings
    from worldmodel.planning.environment import Attempt


def main(argv: list[str]) -> None:
    """Plan once from an image, or play episodes of an environment by plans."""
    args = _parser().parse_args(argv)
    if (args.start is None) == (args.env is None):
        raise InputError("Pass either --start IMAGE or --env ENV_ID.")
    score, words = _until(args.until)
    if sum(given is not None for given in (args.goal, args.reward, words)) > 1:
        raise InputError("Pass one goal: --goal IMAGE, --reward MODULE:NAME, or --until with words.")
    if words is not None and args.true_simulator:
        raise InputError("--true-simulator has no language model that judges a goal in words; leave it out.")
    check_files(args.start, args.goal)
    check_model(args.model)
    from worldmodel.planning import GoalImage, ModelSimulator, PlanSettings, Reached, Return

    reward = None if args.reward is None else import_callable("reward", args.reward)
    settings = PlanSettings(
        method=args.method,
        horizon=args.horizon,
        hold=args.hold,
        candidates=args.candidates,
        iterations=args.iterations,
        until=score,
        seed=args.seed,
        risk=args.risk,
    )
    model = load_model(args.model, base=args.base, device=args.device)
    size = model.config.codec.image_size
    objective = GoalImage(args.goal, size) if args.goal else Return(reward, args.discount)
    simulator = ModelSimulator(model, args.seed, goal=words)
    if words is not None:
        objective = Reached()
    if args.env:
        _try_in_environment(args, simulator, objective, settings)
    else:
        _plan_from_image(args, simulator, objective, settings)


def _until(given: str | None) -> tuple[float, str | None]:
    """Return the score with which a search ends, and the goal in words, if it is one."""
    if given is None:
        return float("inf"), None
    try:
        return float(given), None
    except ValueError:
        return 0.5, given


def _plan_from_image(
    args: Namespace, simulator: "ModelSimulator", objective: "Objective", settings: "PlanSettings"
) -> None:
    from worldmodel.planning import plan

    model = simulator.model
    session = model.session(args.seed)
    session.reset(args.start)
    check_observation(session)
    others = simulator.futures(session.state, args.futures - 1)
    actions = _actions(args, model)
    found = plan(simulator, session.state, objective, actions, settings, futures=others)
    for number, action in enumerate(found.trajectory.actions, 1):
        print(f"{number:3d}  {action}")
    print(f"score {found.score:g} after {found.num_rounds} rounds")
    if args.futures > 1:
        mean = sum(found.scores) / len(found.scores)
        print(f"in {args.futures} futures: {mean:g} expected, {min(found.scores):g} at worst")
    if args.out:
        for action in found.trajectory.actions:
            session.step(action)
        print(session.save(args.out))


def _actions(args: Namespace, model: "WorldModel") -> "ActionSet":
    from worldmodel.planning import Choices, action_set
    from worldmodel.rollout.action_list import parse_action

    if not args.action:
        return action_set(model.config)
    per_round = model.config.action.per_round
    return Choices(tuple(parse_action(text).of_round(per_round) for text in args.action))


def _try_in_environment(
    args: Namespace, learned: "ModelSimulator", objective: "Objective", settings: "PlanSettings"
) -> None:
    import numpy as np
    from tqdm import tqdm

    from worldmodel.planning.environment import EnvironmentSimulator, control, random_attempt
    from worldmodel.rollout.recording import Recording

    model = learned.model
    played = open_environment(args, model.config.codec.image_size)
    actions = _actions(args, model)
    true = EnvironmentSimulator(played) if args.true_simulator else None
    plans = args.plans or (None if args.replan else 8)
    attempts: dict[str, list[Attempt]] = {}
    for seed in range(args.seed, args.seed + args.episodes):

        def planned(simulator: Any, most: int | None, seed: int = seed) -> "Attempt":
            total = -(-args.max_steps // args.replan) if most is None else most
            with tqdm(desc=f"seed {seed}", total=total, unit="plan", leave=False, disable=None) as bar:
                return control(
                    played, seed, simulator, objective, actions, settings, most, args.replan,
                    progress=lambda made: bar.update(),
                )  # fmt: skip

        made = {
            "planned in the model": planned(learned, plans),
            "random actions": random_attempt(played, seed, actions, np.random.default_rng(seed)),
        }
        if true is not None:
            # Nothing differs from what it predicts, so its plans are carried out to their end.
            made["planned in the environment itself"] = planned(true, plans if args.replan else 1)
        for name, attempt in made.items():
            attempts.setdefault(name, []).append(attempt)
        attempt = made["planned in the model"]
        if args.out and seed == args.seed:
            clips = tuple(frame[None] for frame in attempt.frames)
            Recording(clips, tuple(attempt.actions)).save(args.out, model.config.fps)
        print(
            f"seed {seed}: {'success' if attempt.success else 'failure'} after {len(attempt.actions)} steps "
            f"and {len(attempt.plans)} plans of {sum(each.num_rounds for each in attempt.plans)} rounds, "
            f"greatest reward {max(attempt.rewards):.3g}",
            flush=True,
        )
    played.close()
    _print_table(attempts)
    if not args.replan:
        first = [each.success and len(each.plans) == 1 for each in attempts["planned in the model"]]
        print(f"{'planned in the model, by the first plan':40s} {f'{sum(first)} of {len(first)}':>12s}")


def _print_table(attempts: "Mapping[str, Sequence[Attempt]]") -> None:
    print(f"{'':40s} {'success':>12s} {'return':>9s} {'greatest reward':>16s}")
    for name, each in attempts.items():
        wins = f"{sum(attempt.success for attempt in each)} of {len(each)}"
        returned = sum(attempt.reward for attempt in each) / len(each)
        greatest = sum(max(attempt.rewards) for attempt in each) / len(each)
        print(f"{name:40s} {wins:>12s} {returned:9.3f} {greatest:16.3f}")


def _parser() -> Parser:
    parser = Parser(
        "worldmodel plan",
        "Search for actions that lead a world to a goal, by playing them in a model.\n"
        "With --env, episodes of the real environment are played by such plans, and by random actions.",
        "worldmodel plan mine --start now.png --goal wanted.png --out plan.mp4\n"
        "  worldmodel plan shapes-tiny --start now.png --until 'is there a yellow thing' --method search \\\n"
        "    --action 'the red ball turns yellow' --action 'the red ball moves left'\n"
        "  worldmodel plan mine --env minigrid:MiniGrid-DoorKey-6x6-v0 --method search --horizon 24 \\\n"
        "    --candidates 256 --until 0.5 --episodes 20",
    )
    parser.add_argument("model", metavar="MODEL", help="name or folder of a model")
    add_base_option(parser)
    goal = parser.add_argument_group("goal")
    option(goal, "--goal", "an image to arrive at", metavar="IMAGE")
    option(
        goal,
        "--reward",
        "function of the frames of a round and its action, or a class of such functions, whose sum is "
        "maximised (default: the rewards that the model predicts)",
        metavar="MODULE:NAME",
    )
    option(goal, "--discount", "of rewards", 1.0)
    option(
        goal,
        "--until",
        "end the search with this score; or a goal in words: a question that the model answers by yes or no "
        "('is there a yellow thing'), whose probability of yes is then what counts",
        metavar="SCORE|GOAL",
    )
    _add_search_options(parser)
    _add_places(parser)
    return parser


def _add_search_options(parser: Parser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument(
        "--method",
        choices=("random", "cem", "mppi", "search"),
        default="cem",
        help="random sequences, the cross-entropy method, path integrals, or breadth-first search of a world "
        "with keys (default: %(default)s)",
    )
    option(
        search,
        "--action",
        "an action to choose from, as for rollout; repeatable (default: the model's vectors or keys)",
        metavar="ACTION",
        repeated=True,
    )
    option(search, "--horizon", "most actions of a plan", 12)
    option(search, "--hold", "rounds for which each action is held, except for search", 1)
    option(search, "--candidates", "sequences per iteration; for search, states of a depth", 64)
    option(search, "--iterations", "except for search", 4)
    option(
        search, "--seed", "seed of the search, the world and the episodes (default: 0)", 0, kind=seed_number
    )
    add_device_option(search)


def _add_places(parser: Parser) -> None:
    image = parser.add_argument_group("one plan")
    option(image, "--start", "image or video to start from", metavar="IMAGE")
    option(image, "--futures", "futures of an uncertain world in which each plan is tried", 1)
    image.add_argument(
        "--risk",
        choices=("expected", "worst"),
        default="expected",
        help="whether the mean of their scores counts, or the lowest (default: %(default)s)",
    )
    option(
        parser,
        "--out",
        "write the plan, or the first episode of the real environment, as .mp4, .gif or .png",
        metavar="FILE",
    )
    environment = parser.add_argument_group("the real environment")
    option(environment, "--env", "id of a Gymnasium environment, or module:ID", metavar="ENV_ID")
    add_environment_options(environment)
    option(environment, "--episodes", "episodes to play", 10)
    option(
        environment,
        "--plans",
        "most plans of an episode (default: 8, or with --replan what its steps need)",
        kind=int,
    )
    option(
        environment, "--replan", "make a new plan after N actions; 0: when a frame differs from the plan", 0
    )
    environment.add_argument(
        "--true-simulator",
        action="store_true",
        help="also plan in copies of the environment itself, the best that a model can be",
    )
