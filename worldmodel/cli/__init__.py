"""The command line, `worldmodel VERB …`.

Every verb is one module with a `main(argv)` that parses its arguments and then imports what it runs, so that
`--help` is fast. Errors are reported by `errors.exit_code` and nowhere else. Exit codes: 0 success, 1 a bug
(traceback), 2 a user error (one sentence on stderr), 130 interrupted, 141 the reader of a pipe has gone.
"""

import importlib
import sys

from worldmodel import __version__
from worldmodel.cli.parser import Parser
from worldmodel.errors import InputError, did_you_mean, exit_code

VERBS = {
    "rollout": "generate a video from an observation and a list of actions",
    "describe": "describe an observation, answer a question about it, or infer an action",
    "info": "show the components, actions and figures of a model",
    "plan": "search for actions that lead to a goal, and try them in the real environment",
    "rank": "order policies by what they earn in a world, and in the real environment",
    "eval": "evaluate a model and write a report",
    "demo": "steer a model on a web page",
    "first-steps": "run a short tour of what a model can do",
    "serve": "serve a model over HTTP and WebSocket",
    "new": "write a config that trains a model from scratch on your data",
    "train": "train or fine-tune a model",
    "export": "convert a training checkpoint, or write a model as a page that plays it",
    "publish": "evaluate a finished run and write its model folder and model card",
    "verify": "measure the published figures of a model again",
    "download": "download a base language model",
    "record": "record an environment or a world to train on",
    "convert": "convert a Minari dataset, or recordings of Minecraft, to train on",
    "encode": "compute the latents of a table's clips before training",
    "data": "examine a data source, and hold out episodes",
    "flow": "fetch, filter, caption and encode clips while a model trains on them",
    "config": "print or list configurations",
    "list": "list worlds, base models, configs and policies",
}
"""Verbs and their summaries; the verb `first-steps` is the module `worldmodel.cli.first_steps`."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    return exit_code(lambda: _run([*(sys.argv[1:] if argv is None else argv)]))


def _run(argv: list[str]) -> None:
    verbs = "\n".join(f"  {name:11s} {summary}" for name, summary in VERBS.items())
    parser = Parser(
        "worldmodel",
        f"Train, run and serve world models that take text, images, video and actions.\n\nverbs:\n{verbs}",
        'worldmodel rollout first_frame.png "the red ball moves left" "the blue box jumps"\n'
        "  worldmodel VERB --help",
    )
    parser.add_argument("--version", action="version", version=f"worldmodel {__version__}")
    parser.add_argument("verb", metavar="VERB", help="one of the verbs above")
    verb = argv[0] if argv and not argv[0].startswith("-") else parser.parse_args(argv).verb
    if verb not in VERBS:
        raise InputError(
            f"There is no verb {verb!r}{did_you_mean(verb, VERBS)}; use one of {', '.join(VERBS)}."
        )
    importlib.import_module(f"worldmodel.cli.{verb.replace('-', '_')}").main(argv[1:])
