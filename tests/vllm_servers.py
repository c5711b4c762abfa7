"""Real `vllm serve` processes, their clients, and the processes behind an engine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

from integration.cluster import wait_until
from integration.test_two_instances import books
from kvadmit.errors import KvAdmitError
from vllm_engines import BLOCK_TOKENS, SHORT_WAITS, START_WAIT_S, STOP_WAIT_S

REQUEST_WAIT_S = 120.0
VLLM = Path(sys.executable).parent / "vllm"


class ProcessTree:
    """A process and all below it, as they are now; pidfds, so that no pid is mistaken."""

    def __init__(self, pid: int) -> None:
        self.names: dict[int, str] = {}
        self._descriptors: dict[int, int] = {}
        pending = [pid]
        while pending:
            one = pending.pop()
            with contextlib.suppress(OSError):  # it has ended meanwhile
                self._descriptors[one] = os.pidfd_open(one)
                self.names[one] = _title(one)
                pending += _children(one)

    def pid_of(self, title: str) -> int:
        """Return the pid of the one process whose title contains `title`."""
        (found,) = [pid for pid, name in self.names.items() if title in name]
        return found

    def kill(self, pid: int) -> None:
        """Send SIGKILL to one of them."""
        self.send(pid, signal.SIGKILL)

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of them, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptors[pid], number)

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to all that are still there."""
        for pid in self._descriptors:
            self.send(pid, number)

    def have_ended(self) -> bool:
        """Whether none of them is left."""
        ended = select.select(list(self._descriptors.values()), [], [], 0)[0]
        return len(ended) == len(self._descriptors)

    def wait_ended(self, wait_s: float, title: str = "") -> float:
        """Wait, bounded, for the end of all with `title` in theirs; returns how long it took."""
        began_s = time.monotonic()
        left = {d: pid for pid, d in self._descriptors.items() if title in self.names[pid]}
        while left:
            left_s = began_s + wait_s - time.monotonic()
            ended = select.select(list(left), [], [], max(0.0, left_s))[0]
            alive = {pid: self.names[pid] for pid in left.values()}
            assert ended, f"alive after {wait_s} s: {alive}"
            for descriptor in ended:
                del left[descriptor]
        return time.monotonic() - began_s

    def shared_memory(self) -> set[str]:
        """Return the files of /dev/shm that any of them has mapped."""
        found: set[str] = set()
        for pid in self.names:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    path = line[line.find("/dev/shm/") :] if "/dev/shm/" in line else ""
                    if path and not path.endswith("(deleted)"):
                        found.add(path)
        return found

    def close(self) -> None:
        """Kill whoever is left. Idempotent."""
        for pid in self._descriptors:
            self.kill(pid)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _title(pid: int) -> str:
    """Return the command line of a process; vLLM writes what the process is in there."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


class Server:
    """One `vllm serve`. `flags`: what follows the model; `core`: where its worker computes;
    `environment`: more of it.

    Left to itself every vLLM on a machine of two cores computes on the first.
    """

    def __init__(self, model: Path, flags: Sequence[str], *, core: int, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.model = str(model)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        command = [str(VLLM), "serve", self.model, "--host=127.0.0.1", f"--port={self.port}"]
        self.process = subprocess.Popen(
            [
                *command,
                "--enforce-eager",
                "--dtype=float32",
                f"--block-size={BLOCK_TOKENS}",
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ
            | {
                "KVADMIT_CHECK": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
            }
            | SHORT_WAITS
            | environment,
        )
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            max_retries=0,
            timeout=REQUEST_WAIT_S,
        )

    def wait_ready(self) -> Server:
        """Wait until it answers; fails with its log when it does not."""
        deadline_s = time.monotonic() + START_WAIT_S
        while True:
            with contextlib.suppress(OSError):
                self.get("/health")
                return self
            assert self.process.poll() is None, f"it ended\n{self.log()}"
            assert time.monotonic() < deadline_s, f"not up in {START_WAIT_S} s\n{self.log()}"
            time.sleep(0.1)

    def get(self, path: str) -> str:
        """Return the body of a GET; OSError if it is not answered well."""
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: str | list[int], tokens: int) -> Any:
        """Return a greedy completion of exactly `tokens`; raises what the client raises."""
        return self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )

    def stream(self, prompt: list[int], tokens: int) -> Any:
        """Return the pieces of a greedy completion of exactly `tokens`, with their token ids."""
        return self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )

    def terminate(self) -> tuple[int, float]:
        """Send SIGTERM; return exit status and seconds until the end."""
        began_s = time.monotonic()
        self.process.terminate()
        return self.process.wait(STOP_WAIT_S), time.monotonic() - began_s

    def tree(self) -> ProcessTree:
        """Return its processes as they are now."""
        return ProcessTree(self.process.pid)

    def log(self) -> str:
        """Return what its processes have written."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End all of its processes. Idempotent."""
        if self.process.poll() is None:
            tree = self.tree()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.terminate()
            tree.close()
            self.process.wait(STOP_WAIT_S)
        self.client.close()
        self._log.close()


@contextlib.contextmanager
def serving(*servers: Server) -> Iterator[None]:
    """Wait until all of `servers` answer; end them after the block."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.wait_ready()
        yield


class Load:
    """Requests to one server, all at once, from as many clients."""

    def __init__(self, server: Server, wanted: list[list[int]], tokens: int) -> None:
        self._tokens = tokens
        self._pool = ThreadPoolExecutor(len(wanted))
        self._futures: list[Future[Any]] = [
            self._pool.submit(server.complete, prompt, tokens) for prompt in wanted
        ]

    @property
    def done(self) -> bool:
        """Whether all requests have ended, well or not."""
        return all(future.done() for future in self._futures)

    def finish(self) -> None:
        """Wait for all; fails if a single one failed or was cut short."""
        try:
            answers = [future.result(REQUEST_WAIT_S) for future in self._futures]
        finally:
            self._pool.shutdown()
        reasons = {answer.choices[0].finish_reason for answer in answers}
        assert reasons == {"length"}
        assert {answer.usage.completion_tokens for answer in answers} == {self._tokens}

    def errors(self) -> list[BaseException | None]:
        """Wait for all and return what each raised."""
        found = [future.exception(REQUEST_WAIT_S) for future in self._futures]
        self._pool.shutdown()
        return found


def command_line_status(run_dir: Path, *flags: str) -> str:
    """Return what `kvadmit status` prints."""
    command = [sys.executable, "-m", "kvadmit.cli", "status", "--run-dir", str(run_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def held_bytes(run_dir: Path) -> dict[str, int]:
    """Return the bytes each instance holds, by name, as `kvadmit status` says."""
    snapshot = json.loads(command_line_status(run_dir, "--json"))
    return {name: one["held_bytes"]["host"] for name, one in snapshot["instances"].items()}


def current_books(run_dir: Path) -> dict[str, Any]:
    """Return the arbiter's snapshot, also in the moment in which one follows another."""
    found: list[dict[str, Any]] = []

    def answered() -> bool:
        with contextlib.suppress(KvAdmitError):
            found.append(books(run_dir))
        return bool(found)

    wait_until(answered, "an arbiter answers")
    return found[0]


def held(run_dir: Path, name: str) -> int:
    """Return the bytes that the arbiter counts an instance for; 0 if it knows none."""
    instance = current_books(run_dir)["instances"].get(name)
    return 0 if instance is None else int(instance["held_bytes"]["host"])
