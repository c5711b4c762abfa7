"""Rules every test keeps: nothing it opened outlives it."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None)
# In CI the same examples each time: a red run must be one that anybody can repeat.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

pytest.register_assert_rewrite("unit.vmm_conformance")

_THREAD_END_S = 5.0


def _open_files() -> Counter[str]:
    """Return what this process has open, by the name the kernel gives it."""
    names: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the listing's own descriptor
        # Sockets and pipes carry a number that says nothing to a reader.
        names[target.partition(":[")[0]] += 1
    return names


def _children() -> set[int]:
    """Return the pids of this process's children, zombies included."""
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            children.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:
            continue  # the thread has ended
    return children


def _new_files(before: Counter[str]) -> Counter[str]:
    return _open_files() - before


@pytest.fixture(autouse=True)
def _nothing_outlives_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a file, a socket or a child process behind.

    Tests of a real engine are exempt in this process: vLLM and torch keep pools of all of
    these. What they leave on the host is asserted by those tests themselves.
    """
    if request.node.get_closest_marker("vllm") or request.node.get_closest_marker("gpu"):
        yield
        return
    threads = set(threading.enumerate())
    files, children = _open_files(), _children()
    yield
    left: list[str] = []
    for thread in set(threading.enumerate()) - threads:
        thread.join(_THREAD_END_S)
        if thread.is_alive():
            left.append(f"thread {thread.name}")
    if _new_files(files):
        gc.collect()  # an object that only the collector frees is not a leak
    left += [f"{count} open {name}" for name, count in _new_files(files).items()]
    left += [f"child process {pid}" for pid in _children() - children]
    assert not left, f"left behind by the test: {', '.join(left)}"
