"""Games whose models have an evaluation suite of their own."""

from typing import TYPE_CHECKING

from worldmodel.errors import InputError
from worldmodel.worlds.base import World

if TYPE_CHECKING:
    from worldmodel.eval.suite import EvalSuite


class CrafterWorld(World):
    """Crafter, judged by the game's own map. Its episodes are those of an environment."""

    name = "crafter"

    def eval_suite(self) -> "EvalSuite":
        """Return the suite, which plays the game.

        Raises:
            InputError: The game is not installed.
        """
        try:
            from worldmodel.games.crafter.evaluation import CrafterSuite
        except ImportError:
            raise InputError(
                "The suite of Crafter plays the game; run pip install crafter gymnasium."
            ) from None
        return CrafterSuite()
