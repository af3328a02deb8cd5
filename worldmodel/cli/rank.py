"""`worldmodel rank`: order policies by what they earn in a world, and in the real environment."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel.cli.environment import add_environment_options, open_environment
from worldmodel.cli.model import add_base_option, add_device_option, check_model, load_model
from worldmodel.cli.parser import Parser, option, seed_number
from worldmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worldmodel.planning.ranking import RankedPolicy


def main(argv: list[str]) -> None:
    """Play episodes of every policy in a world and in the environment; print both returns and their order."""
    args = _parser().parse_args(argv)
    if len(set(args.policies)) < len(args.policies):
        raise InputError("A policy is named twice; name each once, for example with another @SHARE.")
    if len(args.policies) < 2 or args.episodes < 1:
        raise InputError(
            f"There are {len(args.policies)} policies and {args.episodes} episodes; use 2 or more policies "
            "and 1 or more episodes."
        )
    if args.json and Path(args.json).expanduser().is_dir():
        raise InputError(f"--json is {args.json!r}, which is a folder; pass a file name.")
    check_model(args.world)
    from tqdm import tqdm

    from worldmodel.io import atomic_file
    from worldmodel.planning import ModelSimulator
    from worldmodel.planning.ranking import agreement, rank_policies

    model = load_model(args.world, base=args.base, device=args.device)
    played = open_environment(args, model.config.codec.image_size)
    seeds = range(args.seed, args.seed + args.episodes)
    most = 2 * len(args.policies) * args.episodes * args.max_steps  # fewer where episodes end
    with tqdm(desc="steps and rounds", total=most, leave=False, disable=None) as bar:
        ranked = rank_policies(
            args.policies,
            played,
            ModelSimulator(model, args.seed),
            seeds,
            model.config.action.per_round,
            progress=bar.update,
        )
    played.close()
    figure = agreement(ranked)
    _print_table(ranked)
    alike = math.isnan(figure["value"])  # all policies earn the same on one side, which has no order then
    found = "unknown" if alike else f"{figure['value']:.2f} ({figure['low']:.2f} to {figure['high']:.2f})"
    print(f"Spearman's rank correlation: {found}; {figure['n']} policies, {args.episodes} episodes each")
    if args.json:
        policies = {each.name: {"imagined": each.imagined, "real": each.real} for each in ranked}
        spearman = None if alike else figure  # JSON has no NaN
        with atomic_file(args.json) as temporary:
            temporary.write_text(json.dumps({"spearman": spearman, "policies": policies}) + "\n", "utf-8")


def _print_table(ranked: "Sequence[RankedPolicy]") -> None:
    """Print the best policy of the world first."""
    width = max(len(each.name) for each in ranked)
    print(f"{'policy':{width}s} {'imagined':>9s} {'real':>9s}")
    for each in sorted(ranked, key=lambda each: -sum(each.imagined)):
        imagined, real = (sum(totals) / len(totals) for totals in (each.imagined, each.real))
        print(f"{each.name:{width}s} {imagined:9.3f} {real:9.3f}")


def _parser() -> Parser:
    parser = Parser(
        "worldmodel rank",
        "Order policies by the rewards that a world predicts for them, beside those of the environment.\n"
        "Both begin with the same first frames. Policies see frames alone, as the world shows them.",
        "worldmodel rank random sticky worldmodel.games.minigrid:Player \\\n"
        "    worldmodel.games.minigrid:Player@0.5 worldmodel.games.minigrid:Player@0.8 \\\n"
        "    --world minigrid-doorkey --env minigrid:MiniGrid-DoorKey-6x6-v0",
    )
    parser.add_argument(
        "policies",
        metavar="POLICY",
        nargs="+",
        help="random, sticky, MODULE:NAME or sb3:ALGORITHM:FILE, as for record, with @SHARE of random "
        "actions behind it, if at all; it gets a frame, uint8 [h, w, 3]",
    )
    parser.add_argument("--world", metavar="MODEL", required=True, help="name or folder of a model")
    parser.add_argument(
        "--env", metavar="ENV_ID", required=True, help="id of a Gymnasium environment, or module:ID"
    )
    add_base_option(parser)
    option(parser, "--episodes", "episodes of each policy", 20)
    add_environment_options(parser)
    option(parser, "--seed", "seed of the first episode and of the world (default: 0)", 0, kind=seed_number)
    option(parser, "--json", "also write the returns of all episodes", metavar="FILE")
    add_device_option(parser)
    return parser
