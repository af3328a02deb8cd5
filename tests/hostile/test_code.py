"""Calls that no module of the server may contain, checked in the syntax trees.

CVE-2025-62164, CVE-2026-3059, CVE-2026-25874 and others were servers that deserialised clients' bytes.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("worldmodel", "train", "serving", "demo") for path in (ROOT / folder).rglob("*.py")
)

RUNS_WHAT_IT_READS = {
    *(
        "pickle",
        "_pickle",
        "cPickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "multiprocessing",
    ),
    *("torch.multiprocessing", "concurrent.futures.process", "xmlrpc", "code", "codeop", "runpy"),
}
"""Modules that execute data, directly or in other modules."""
BARE_CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
CALLS = {
    *(
        "torch.load",
        "torch.jit.load",
        "torch.hub.load",
        "torch.package.PackageImporter",
        "np.load",
        "numpy.load",
    ),
    *("yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "pickle.load", "pickle.loads"),
    *("urllib.request.urlopen", "requests.get", "requests.post", "gr.load", "gradio.load"),
}
CLIENTS = ("serving/client/", "demo/")
"""Clients, which send HTTP requests to the server that their user names."""
FETCHERS = {"httpx", "requests", "urllib3", "aiohttp", "urllib.request", "http.client", "ftplib"}
READERS = {"read_image", "read_video", "read_observation"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


FLOW = ("worldmodel/flow/", "worldmodel/plugins/")
"""They fetch the addresses of their config: clips by a client that reaches no private network (test_fetch.py)
and, in the plug-in of Pulsar, the HTTP interface of its broker."""
EXPORT = "worldmodel/export/"
"""It fetches JavaScript libraries for a page, by their checksums; no server imports it (test below)."""
SERVER = [path for path in SOURCES if not name_of(path).startswith((*CLIENTS, "train/", *FLOW, EXPORT))]


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_of(nodes: list[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def touches(names: set[str], modules: set[str]) -> set[str]:
    """Return the imported names that are, or are in, one of the modules."""
    return {name for name in names for module in modules if f"{name}.".startswith(f"{module}.")}


def breaches(nodes: list[ast.AST]) -> set[str]:
    """Return what a module does that no module may."""
    found = touches(imports_of(nodes), RUNS_WHAT_IT_READS) | (imports_of(nodes) & CALLS)
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in CALLS or (isinstance(node.func, ast.Name) and called in BARE_CALLS):
            found.add(called)
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", None)
            settings = {
                ("trust_remote_code", True),
                ("weights_only", False),
                ("allow_pickle", True),
                ("shell", True),
            }
            if (keyword.arg, value) in settings:
                found.add(f"{keyword.arg}={value}")
    return found


ALLOWED = {
    # Libraries at addresses that are written there, whose checksums are, too.
    "worldmodel/export/web/runtime.py": {"urllib.request.urlopen"},
    # Only to find out whether vLLM started this process.
    "serving/engine/vllm_plugin.py": {"multiprocessing"},
    # Only between a process and those that it starts, over a private socket pair.
    "worldmodel/processes.py": {"pickle", "pickle.loads"},
    # Only for the processes that play environments, which it starts itself.
    "worldmodel/recording/__init__.py": {"multiprocessing"},
}
FORBIDDEN_CODE = (
    "import pickle",
    "from pickle import loads",
    "def f():\n    import marshal",
    "from torch import load",
    "torch.load(x)",
    "eval('1')",
    "exec(text)",
    "AutoModel.from_pretrained(x, trust_remote_code=True)",
    "np.load(x)",
    "subprocess.run(x, shell=True)",
    "from multiprocessing import Pipe",
)


def test_no_module_executes_data() -> None:
    assert [code for code in FORBIDDEN_CODE if not breaches(list(ast.walk(ast.parse(code))))] == []
    harmless = "model.eval(); re.compile('x'); import codecs"
    assert breaches(list(ast.walk(ast.parse(harmless)))) == set()

    assert len(SOURCES) > 300
    found = {name_of(path): breaches(nodes_of(path)) for path in SOURCES}
    assert {name: names for name, names in found.items() if names} == ALLOWED


# Posts to the one address that the operator gives at start, through the guard against private addresses.
OUTGOING = {
    "serving/videos/webhooks.py": {
        "httpx",
        "worldmodel.flow.download.guard",
        "worldmodel.flow.download.guard.GuardedBackend",
        "worldmodel.flow.errors",
        "worldmodel.flow.errors.FlowError",
    }
}


def test_no_server_module_fetches_addresses() -> None:
    """CVE-2026-24779, CVE-2026-33626: servers that fetched what a request named."""
    found = {}
    for path in SERVER:
        forbidden = set(FETCHERS)
        if path.is_relative_to(ROOT / "serving"):
            forbidden |= {"worldmodel.serving.client", "worldmodel.flow", "worldmodel.export"}
        found[name_of(path)] = touches(imports_of(nodes_of(path)), forbidden)
    assert {name: names for name, names in found.items() if names} == OUTGOING


def test_only_the_child_decodes() -> None:
    """CVE-2026-22778: clients' bytes were decoded in the server's own process."""
    readers, openers = [], []
    for path in SERVER:
        if not path.is_relative_to(ROOT / "serving"):
            continue
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        called = {ast.unparse(node.func).rsplit(".", 1)[-1] for node in calls}
        imported = {name.rsplit(".", 1)[-1] for name in imports_of(nodes_of(path))}
        if READERS & (called | imported):
            readers.append(path.name)
        for node in calls:
            opens = ast.unparse(node.func) in {"Image.open", "av.open", "av.container.open"}
            muxer = (
                ast.unparse(node.func) == "av.open"
                and len(node.args) > 1
                and ast.unparse(node.args[1]) == "'w'"
            )
            if opens and not muxer:
                openers.append(f"{name_of(path)}:{node.lineno}")
    assert readers == ["decode_child.py"]
    assert openers == []
