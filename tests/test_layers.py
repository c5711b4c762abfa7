"""The layer table of the package, held against what its modules import.

Reads the source, so a module that cannot be imported here (no vLLM, no GPU) is checked like
any other. A new module has to be given its place in `LAYERS` first.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "kvadmit"

LEAVES = ("errors", "units", "config", "messages", "vmm")
"""In this order: a leaf imports only leaves before it."""

LAYERS: dict[str, tuple[str, ...]] = {
    "leaf": LEAVES,
    "core": (
        "extents",
        "geometry",
        "ledger",
        "membership",
        "policy",
        "admission",
        "orders",
        "states",
        "reports",
        "pool_side",
        "start_calls",
        "group_events",
        "group",
        "member",
        "arbitration_events",
        "elections",
        "arbitration",
        "link",
        "port",
        "pool",
    ),
    "edge": (
        "descriptors",
        "vmm_cuda",
        "vmm_host",
        "vmm_states",
        "host_pool",
        "channel",
        "agent_channel",
        "outbox",
        "lease",
        "rundir",
        "rendezvous",
        "ranks",
        "pending",
        "processes",
        "timers",
        "postmortem",
        "observe",
    ),
    "shell": ("coordinator", "agent", "arbiter"),
    "door": ("vllm", "cli", "doctor", "arbiter_process", "__main__"),
    "fake": ("testing",),
}
"""Layer -> modules; a package stands for all modules in it."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "leaf": ("leaf",),
    "core": ("leaf", "core"),
    "edge": ("leaf", "edge"),
    "shell": ("leaf", "core", "edge"),
    "door": ("leaf", "core", "edge", "shell", "door"),
    "fake": ("leaf", "core", "edge", "fake"),
}
EDGES_BEYOND_THE_TABLE = {("edge", "extents")}
"""Layer and a module of a higher one that it may import all the same."""

ONLY_IMPORTERS: dict[str, tuple[str, ...]] = {
    "zmq": ("channel", "agent_channel"),
    "torch": ("vllm",),
    "vllm": ("vllm",),
    "uvloop": ("coordinator", "agent", "arbiter"),
    "prometheus_client": ("vllm",),
    "numpy": ("testing",),
    "safetensors": ("testing",),
    "tokenizers": ("testing",),
}
"""Library -> the modules (or packages) that alone may import it."""

FORBIDDEN_IN_CORE = (
    "asyncio",
    "ctypes",
    "fcntl",
    "logging",
    "multiprocessing",
    "os",
    "random",
    "select",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
)
"""A pure machine has no clock, socket, thread, driver or randomness of its own."""

MODEL_FILES = {"numpy", "safetensors", "tokenizers"}
"""What writes the tiny model's files; all of it comes with vLLM."""
LIBRARIES = {"msgspec", "zmq", "uvloop", "torch", "vllm", "prometheus_client"} | MODEL_FILES
"""All that the package may import beside the standard library and itself."""


def find_modules() -> dict[str, Path]:
    """Return module name below the package -> file; `""` is the package itself."""
    found: dict[str, Path] = {}
    root = SOURCE / PACKAGE
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = find_modules()


def imports_of(path: Path) -> set[str]:
    """Return the dotted names a file imports, anywhere in it, with `from` names appended."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def own_imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports."""
    found: set[str] = set()
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        # `from kvadmit.x import y`: y is a module, or something inside module x.
        inner = ".".join(parts[1:])
        found.add(inner if inner in MODULES else ".".join(parts[1:-1]))
    return found


def libraries_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)} - {PACKAGE, "__future__"}


def top_of(module: str) -> str:
    return module.split(".")[0]


def layer_of(module: str) -> str:
    for layer, members in LAYERS.items():
        if top_of(module) in members:
            return layer
    raise AssertionError(f"{PACKAGE}.{module} has no place in LAYERS: decide which layer it is")


def breach(module: str, target: str) -> str:
    """Say why `module` may not import `target`; empty if it may."""
    layer, target_layer = layer_of(module), layer_of(target)
    if module == target or (layer, target) in EDGES_BEYOND_THE_TABLE:
        return ""
    if target_layer not in MAY_IMPORT[layer]:
        return f"a {layer} ({module}) imports a {target_layer} ({target})"
    if layer == target_layer == "leaf" and LEAVES.index(target) >= LEAVES.index(module):
        return f"leaf {module} imports leaf {target}, which comes after it"
    return ""


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_a_module_imports_only_layers_below_it(module: str) -> None:
    breaches = [breach(module, target) for target in own_imports(MODULES[module]) if target]
    assert not [text for text in breaches if text]


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_libraries_stay_where_they_belong(module: str) -> None:
    libraries = libraries_of(MODULES[module])
    for library, importers in ONLY_IMPORTERS.items():
        if library in libraries:
            assert top_of(module) in importers, f"{module} imports {library}"
    unknown = libraries - LIBRARIES - sys.stdlib_module_names
    assert not unknown, f"{module} imports {unknown}: a new dependency needs a reason"


@pytest.mark.parametrize("module", [name for name in MODULES if top_of(name) in LAYERS["core"]])
def test_the_core_is_pure(module: str) -> None:
    assert not libraries_of(MODULES[module]) & set(FORBIDDEN_IN_CORE)
    assert not libraries_of(MODULES[module]) & (LIBRARIES - {"msgspec"})


def test_the_front_page_imports_nothing() -> None:
    assert imports_of(MODULES[""]) == set()


def test_there_is_no_import_cycle() -> None:
    graph = {
        module: {target for target in own_imports(path) if target and target != module}
        for module, path in MODULES.items()
    }
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join((*trail, module))
        if module in finished:
            return
        for target in graph[module]:
            visit(target, (*trail, module))
        finished.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("config", "units", True),
        ("units", "config", False),
        ("group", "messages", True),
        ("group", "channel", False),
        ("channel", "errors", True),
        ("channel", "group", False),
        ("vmm_host", "extents", True),
        ("agent", "member", True),
        ("agent", "coordinator", False),
        ("vllm.worker", "agent", True),
        ("vllm.worker", "vllm.plugin", True),
        ("coordinator", "vllm.plugin", False),
        ("testing.recording", "vmm", True),
        ("group", "testing.recording", False),
    ],
)
def test_the_table_says_what_it_means(module: str, target: str, allowed: bool) -> None:
    assert (breach(module, target) == "") is allowed


def test_no_module_reads_a_clock_that_can_be_set() -> None:
    """Deadlines and ages are of the monotonic clock: the wall clock may jump."""
    readers = [
        name
        for name, path in find_modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns"))
        or (isinstance(node, ast.Import) and any(a.name == "datetime" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module in ("datetime", "time"))
    ]
    assert readers == ["rundir"], "a part of an incarnation's name, beside random bits"
