"""The shape of every place of vLLM that a hook relies on, recorded and checked.

Owns: the list of places, how a shape is read from source, and the comparison with
`shapes.json`, which `tools/record_shapes.py` wrote from the released wheels. Must not know:
what a hook does there. Reads source text and imports nothing of vLLM's, so the same code
reads a wheel and an installation.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import textwrap
import tokenize
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Literal

import msgspec

from kvadmit.errors import UnsupportedError

Shape = list[str]
Read = Callable[[str], str | None]
"""Returns the text of a file, named from the package's root (`v1/engine/core.py`), or None."""


class Place(msgspec.Struct, frozen=True):
    """One place: the parameters of a callable, the fields or methods of a class, or a body.

    `files`: where it has lived; the first that holds it counts. `body` is for the one
    function whose text we repeat instead of calling it.
    """

    name: str
    files: tuple[str, ...]
    kind: Literal["parameters", "fields", "methods", "body"] = "parameters"


_CORE = ("v1/engine/core.py",)
_WORKER = ("v1/worker/gpu_worker.py",)
_CPU_WORKER = ("v1/worker/cpu_worker.py",)
_SCHEDULER = ("v1/core/sched/scheduler.py",)
_PLANNER = ("v1/core/kv_cache_planning.py", "v1/core/kv_cache_utils.py")
_QUEUE = ("v1/core/kv_cache_utils.py", "v1/core/kv_cache_planning.py")

PLACES: tuple[Place, ...] = (
    Place("EngineArgs.create_engine_config", ("engine/arg_utils.py",)),
    Place("SchedulerConfig.get_scheduler_cls", ("config/scheduler.py",)),
    Place("Executor.__init__", ("v1/executor/abstract.py",)),
    Place("get_kv_cache_configs", _PLANNER),
    Place("EngineCore.__init__", _CORE),
    Place("EngineCore.shutdown", _CORE),
    Place("EngineCoreProc._process_input_queue", _CORE),
    Place("EngineCoreProc._process_engine_step", _CORE, "body"),
    Place("EngineCoreProc._handle_client_request", _CORE),
    Place("AsyncLLM.check_health", ("v1/engine/async_llm.py",)),
    Place("build_and_serve", ("entrypoints/launchers/api_server/entry.py",)),
    Place("AsyncMPClient.call_utility_async", ("v1/engine/core_client.py",)),
    Place("OutputProcessor.process_outputs", ("v1/engine/output_processor.py",)),
    Place("RequestOutputCollector.put", ("v1/engine/output_processor.py",)),
    Place("GracefulHTTPError.__init__", ("exceptions.py",)),
    Place("EngineCoreOutput", ("v1/engine/__init__.py",), "fields"),
    Place("WorkerWrapperBase.init_worker", ("v1/worker/worker_base.py",)),
    Place("Worker.initialize_from_config", _WORKER),
    Place("Worker._maybe_get_memory_pool_context", _WORKER),
    Place("Worker.compile_or_warm_up_model", _WORKER),
    Place("Worker.execute_model", _WORKER),
    Place("Worker.sample_tokens", _WORKER),
    Place("Worker.shutdown", _WORKER),
    Place("CPUWorker.determine_available_memory", _CPU_WORKER),
    Place("CPUWorker.compile_or_warm_up_model", _CPU_WORKER),
    Place("allocate_kv_cache", ("v1/worker/utils.py",)),
    Place("StructuredOutputManager.grammar_bitmask", ("v1/structured_output/__init__.py",)),
    Place("Scheduler.__init__", _SCHEDULER),
    Place("Scheduler.schedule", _SCHEDULER),
    Place("Scheduler.get_grammar_bitmask", _SCHEDULER),
    Place("Scheduler.update_from_output", _SCHEDULER),
    Place("Scheduler.add_request", _SCHEDULER),
    Place("Scheduler.finish_requests", _SCHEDULER),
    Place("Scheduler.reset_prefix_cache", _SCHEDULER),
    Place("Scheduler._request_blocks_can_be_freed", _SCHEDULER),
    Place("KVCacheManager.allocate_slots", ("v1/core/kv_cache_manager.py",)),
    Place("KVCacheCoordinator.get_num_blocks_to_allocate", ("v1/core/kv_cache_coordinator.py",)),
    Place(
        "SingleTypeKVCacheManager.remove_skipped_blocks",
        ("v1/core/single_type_kv_cache_manager.py",),
    ),
    Place(
        "SingleTypeKVCacheManager.pop_blocks_for_free",
        ("v1/core/single_type_kv_cache_manager.py",),
    ),
    Place("BlockPool.free_blocks", ("v1/core/block_pool.py",)),
    Place("BlockPool.get_new_blocks", ("v1/core/block_pool.py",)),
    Place("BlockPool._maybe_evict_cached_block", ("v1/core/block_pool.py",)),
    Place("FreeKVCacheBlockQueue", _QUEUE, "methods"),
    Place("KVCacheBlock", _QUEUE, "fields"),
    Place("KVCacheTensor", ("v1/kv_cache_interface.py",), "fields"),
    Place("KVCacheSpec.max_memory_usage_bytes", ("v1/kv_cache_interface.py",)),
    Place("KVCacheSpec.page_size_bytes", ("v1/kv_cache_interface.py",)),
)


class Reader:
    """Reads shapes from one tree of source, each file parsed once."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._texts: dict[str, str] = {}
        self._trees: dict[str, ast.Module | None] = {}

    def shape(self, place: Place) -> Shape | None:
        """Return the shape at `place`, or None when this tree has no such place."""
        for file in place.files:
            if file not in self._trees:
                text = self._read(file)
                self._texts[file] = text or ""
                self._trees[file] = None if text is None else ast.parse(text)
            found = _find(self._trees[file], place.name)
            if found is not None and place.kind == "body":
                return [_digest(self._texts[file], found)]
            if found is not None:
                return _shape(found, place.kind)
        return None

    def all(self) -> dict[str, Shape | None]:
        """Return the shapes of all places by name."""
        return {place.name: self.shape(place) for place in PLACES}


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _find(tree: ast.Module | None, name: str) -> _Function | ast.ClassDef | None:
    node: ast.AST | None = tree
    for part in name.split("."):
        if node is None:
            return None
        body = getattr(node, "body", [])
        # The last of its name: earlier ones are overloads for type checkers.
        named = [
            child
            for child in body
            if isinstance(child, _Function | ast.ClassDef) and child.name == part
        ]
        node = named[-1] if named else None
    assert node is None or isinstance(node, _Function | ast.ClassDef)
    return node


def _shape(node: _Function | ast.ClassDef, kind: str) -> Shape:
    if isinstance(node, ast.ClassDef):
        if kind == "methods":
            return sorted(child.name for child in node.body if isinstance(child, _Function))
        return [
            child.target.id
            for child in node.body
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
        ]
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    names += [f"{argument.arg}=" for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return names


def _digest(text: str, node: _Function | ast.ClassDef) -> str:
    """Return a digest of a body's tokens, whatever its comments, docstring and spacing.

    Of tokens, not of the syntax tree, whose dump differs between versions of Python.
    """
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    lines = text.splitlines(keepends=True)[body[0].lineno - 1 : body[-1].end_lineno]
    source = io.StringIO(textwrap.dedent("".join(lines)))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    words = [
        t.string.strip() for t in tokenize.generate_tokens(source.readline) if t.type not in skipped
    ]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


Recorded = dict[str, dict[str, Shape | None]]
"""Version -> place -> shape."""


def recorded() -> Recorded:
    """Return what `tools/record_shapes.py` recorded, by version."""
    text = resources.files("kvadmit.vllm").joinpath("shapes.json").read_text(encoding="utf-8")
    loaded: Recorded = json.loads(text)["versions"]
    return loaded


def minor(version: str) -> str:
    """Return `0.32` for `0.32.0+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check(version: str, found: Mapping[str, Shape | None], known: Recorded) -> None:
    """Raise UnsupportedError unless `version` is known and every place has a known shape.

    One line: the first place that differs, what this vLLM has there and what is known.
    """
    minors = sorted({minor(one) for one in known}, key=lambda text: int(text.split(".")[1]))
    if minor(version) not in minors:
        raise UnsupportedError(
            f"vLLM {version} is not known to this kvadmit, which knows {', '.join(minors)}; "
            "install one of those, or set kvadmit.require=false to serve with stock vLLM"
        )
    for name, shape in found.items():
        shapes = [of[name] for of in known.values() if name in of]
        if shape not in shapes:
            raise UnsupportedError(
                f"vLLM {version} has {name}({_words(shape)}) where this kvadmit knows "
                + " or ".join(sorted({f"({_words(one)})" for one in shapes}))
                + "; set kvadmit.require=false to serve with stock vLLM"
            )


def _words(shape: Shape | None) -> str:
    return "nothing" if shape is None else ", ".join(shape)


def check_installed(version: str, package_path: str) -> None:
    """Check the vLLM installed at `package_path`; raises UnsupportedError."""
    known = recorded()

    def read(file: str) -> str | None:
        try:
            with open(f"{package_path}/{file}", encoding="utf-8") as source:
                return source.read()
        except OSError:
            return None

    check(version, Reader(read).all(), known)
