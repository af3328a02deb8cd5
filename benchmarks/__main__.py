"""Run a benchmark, or list them all.

python -m benchmarks --list
python -m benchmarks server rounds --num-samples 30
"""

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def scripts() -> dict[str, str]:
    """Return the names of all benchmarks with the first line of their documentation."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = text.partition("\n")[0]
    return found


def main() -> None:
    """Run the benchmark that the first argument names with the other arguments."""
    known = scripts()
    name = sys.argv[1] if len(sys.argv) > 1 else "--list"
    if name in ("--list", "-h", "--help"):
        print("\n".join(f"{each:14s} {about}" for each, about in known.items()))
        return
    if name not in known:
        print(f"There is no benchmark {name!r}; use one of {', '.join(known)}.", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"benchmarks {name}", *sys.argv[2:]]
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
