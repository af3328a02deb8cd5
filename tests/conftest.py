"""Shared by all tests: shape checks on every annotated call, profiles of Hypothesis, and plugins."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings
from jaxtyping import install_import_hook

# Packages that compute with tensors. Not hooked: the procedural world, which is called a million times, and
# what checks users' values (types, rollout, media, cli), whose own errors are under test.
HOOKED = ["models", "diffusion", "parallel", "media.tensors", "train"]
if os.environ.get("JAXTYPING_DISABLE", "0") == "0":
    # The hook compiles every module anew and decorates every function, even where the checks are disabled.
    install_import_hook(
        [f"worldmodel.{name}" for name in HOOKED],
        # Numeric tower: an int is accepted wherever a float is.
        "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
    )
settings.register_profile("fast", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=150, deadline=None)
settings.load_profile("fast")

pytest_plugins = ["long_tests", "processor_time", "tiny_models"]


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at the imported packages again: with torch it takes a second."""
    gc.collect()
    gc.freeze()
