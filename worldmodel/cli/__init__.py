"""The command line, `worldmodel VERB …`: each verb parses, runs and prints; the work is the library's.

Exit codes: 0 done, 2 a mistake that the user can mend (one sentence on stderr, no traceback), 1 a bug,
130 interrupted. A verb's module is imported when the verb is called, so that `worldmodel --help` is instant.
"""

import difflib
import importlib
import os
import sys

from worldmodel import __version__
from worldmodel.cli.parser import Parser
from worldmodel.errors import InputError, WorldModelError

VERBS = {
    "rollout": ("worldmodel.cli.rollout", "play actions from an image, a video or a caption"),
    "describe": (
        "worldmodel.cli.describe",
        "say what is seen, answer a question, name the action between two",
    ),
    "eval": ("worldmodel.eval.command", "measure a model against the world's truth"),
    "serve": ("worldmodel.serving.command", "serve a model over HTTP and WebSocket"),
    "demo": ("worldmodel.demo.app", "steer a world on a page in the browser"),
    "train": ("worldmodel.cli.train", "train a model as a configuration says"),
    "export": ("worldmodel.cli.export", "turn a checkpoint of a training run into a model folder"),
    "info": ("worldmodel.cli.info", "say what a model is and what it takes"),
    "config": ("worldmodel.cli.settings", "print or list configurations"),
}
"""Verbs, the modules whose `main(argv)` runs them, and what they do."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except WorldModelError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has left (`… | head`): what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:  # argparse leaves this way after --help and --version
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _run(argv: list[str]) -> int:
    verbs = "\n".join(f"  {name:9s} {summary}" for name, (_, summary) in VERBS.items())
    parser = Parser(
        "worldmodel",
        f"Any2Any world models: steer a world round after round.\n\nverbs:\n{verbs}",
        'worldmodel rollout first_frame.png "the red ball moves left" "the blue box jumps"\n'
        "  worldmodel VERB --help explains a verb",
    )
    parser.add_argument("--version", action="version", version=f"worldmodel {__version__}")
    parser.add_argument("verb", metavar="VERB", help="what to do")
    verb = argv[0] if argv and not argv[0].startswith("-") else parser.parse_args(argv).verb
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(VERBS)}."
        raise InputError(f"There is no verb {verb!r}; {hint}")
    return importlib.import_module(VERBS[verb][0]).main(argv[1:])
