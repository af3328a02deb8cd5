"""Import directions: no circles, also counting imports that only type checkers or calls of functions run."""

import ast
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "worldmodel": ROOT / "worldmodel",
    "worldmodel.train": ROOT / "train",
    "worldmodel.serving": ROOT / "serving",
    "worldmodel.demo": ROOT / "demo",
}
DOOR = ("worldmodel.models.world_model", "worldmodel.rollout")
"""`WorldModel.session` opens a session, the one deliberate import from a layer above."""


def modules() -> dict[str, Path]:
    """Return the files of all modules by their full names."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder)
            if package == "worldmodel" and (folder / relative.parts[0]).is_symlink():
                continue  # the folders beside worldmodel/, which have entries of their own
            parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
            found[".".join([package, *parts])] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports, wherever the import is written."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in known else node.module)
    return names & set(known)


def circles(graph: networkx.DiGraph) -> list[list[str]]:
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def import_graph() -> networkx.DiGraph:
    known = modules()
    graph = networkx.DiGraph()
    for name, path in known.items():
        graph.add_node(name)
        graph.add_edges_from((name, other) for other in imported(path, known) if other != name)
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    assert len(graph) > 400
    graph.remove_edge(*DOOR)
    assert circles(graph) == []


def test_no_packages_import_each_other_in_a_circle() -> None:
    """`worldmodel.models` and its like, each taken as a whole."""
    graph = import_graph()
    graph.remove_edge(*DOOR)
    packages = networkx.DiGraph()
    for name, other in graph.edges:
        above, below = (".".join(each.split(".")[:2]) for each in (name, other))
        if "worldmodel" not in (above, below) and above != below:
            packages.add_edge(above, below)
    assert circles(packages) == []
