#!/usr/bin/env python3
"""Remove one guard at a time and show that a test turns red for each.

    python tools/mutants.py [--only NAME ...] [--json FILE]

A mutant is the package with one guard taken out. Its tests, run over that copy, must fail; one
that passes them all *survives*, and a test is missing. Exit code 1 if any survives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.colocated.result import commit, versions
from tools.fault_mutants import (
    ARBITER_GONE,
    COMMIT_FAILS,
    FAULT_MUTANTS,
    FOREIGN_MEMORY,
    PREPARE_FAILS,
    WORKER_DIES,
    WORKER_STOPPED,
    Mutant,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvadmit"
TEST_WAIT_S = 300.0
FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)


GROUP = ("tests/unit/test_group.py", "tests/property/test_machines.py")
MEMBER = ("tests/unit/test_member.py", "tests/property/test_member.py")
LINK = ("tests/unit/test_link.py", "tests/unit/test_group.py")
POLICY = ("tests/unit/test_policy.py", "tests/property/test_policy.py")
ARBITRATION = ("tests/unit/test_arbitration.py", "tests/property/test_machines.py")
LEDGER = ("tests/unit/test_ledger.py", "tests/property/test_ledger.py")
ADMISSION = ("tests/unit/test_admission.py", "tests/property/test_admission.py")
POOL = ("tests/unit/test_pool.py", "tests/property/test_pool.py")

MUTANTS = (
    # --- what holds memory back until nobody can touch it ---
    Mutant(
        "a decommit does not wait for its fence",
        "member.py",
        "if fence <= self.enqueued and number not in self._awaiting_device:",
        "if number not in self._awaiting_device:",
        MEMBER,
    ),
    Mutant(
        "what is about to be unmapped may still be zeroed",
        "agent.py",
        "                self._forget(wanted.leaving)\n                self._wait()\n",
        "                self._wait()\n                self._forget(wanted.leaving)\n",
        ("tests/integration/test_agent.py", "tests/integration/test_zeroes.py"),
    ),
    Mutant(
        "zeroes are enqueued for what was forgotten meanwhile",
        "vmm_cuda.py",
        "        with self._zeroing:\n            found",
        "        if True:\n            found",
        ("tests/unit/test_vmm_cuda.py",),
    ),
    Mutant(
        "a step begins without zeroes for what is new",
        "vllm/worker.py",
        "            side.begin_step()\n        output",
        "            pass\n        output",
        ("tests/vllm/test_pieces.py",),
    ),
    Mutant(
        "a decommit does not wait for the device",
        "member.py",
        "                self._awaiting_device.add(number)\n"
        "                effects.append(AwaitDevice(number, self._leaving(number)))\n",
        "                self._parked.remove(number)\n"
        "                self._ready.append(number)\n"
        "                break\n",
        MEMBER,
    ),
    Mutant(
        "the driver is called while graphs are captured",
        "member.py",
        "        if self.capturing:\n            return\n",
        "",
        MEMBER,
    ),
    Mutant(
        "an order that was overtaken is carried out",
        "member.py",
        "if any(self._newest_order[extent] > grant.order for extent in extents):",
        "if False:",
        MEMBER,
    ),
    Mutant(
        "a repeated order is carried out twice",
        "member.py",
        "        if grant.order in self._answers:\n",
        "        if False:\n",
        MEMBER,
    ),
    Mutant(
        "the fence of returned extents is lost",
        "group.py",
        'self.book.send("decommit", gone, event.now_s, effects, fence=message.fence)',
        'self.book.send("decommit", gone, event.now_s, effects)',
        GROUP,
    ),
    Mutant(
        "extent 0 may leave",
        "group.py",
        "if 0 in extents or not self.states.all_resident(extents):",
        "if not self.states.all_resident(extents):",
        GROUP,
    ),
    # --- all ranks, whole steps ---
    Mutant(
        "the first rank's answer counts for all",
        "orders.py",
        "        if operation.waiting_ranks:\n            return None\n",
        "",
        GROUP,
    ),
    Mutant(
        "extents that not all ranks prepared are committed",
        "group.py",
        "        if operation.all_done:\n            self.states.move(extents, PREPARING",
        "        if True:\n            self.states.move(extents, PREPARING",
        GROUP,
        PREPARE_FAILS,
    ),
    Mutant(
        "extents that not all ranks committed are handed out",
        "group.py",
        "        left = set(operation.extents) - done\n        if done:",
        "        done = set(operation.extents)\n        left: set[int] = set()\n        if done:",
        GROUP,
        COMMIT_FAILS,
    ),
    Mutant(
        "orphans are never adopted",
        "group.py",
        "        if self.states.count[ORPHAN]:\n            # Bytes",
        "        if False:\n            # Bytes",
        GROUP,
        COMMIT_FAILS,
    ),
    Mutant(
        "growth goes above the allowance",
        "group.py",
        "room = min(batch, self.link.allowance - self.states.held)",
        "room = batch",
        GROUP,
    ),
    Mutant(
        "two growths at a time",
        "group.py",
        "if self.book.growing or self.lost_ranks or not self.link.may_grow:",
        "if self.lost_ranks or not self.link.may_grow:",
        GROUP,
    ),
    # --- levels and epochs ---
    Mutant(
        "an older allowance replaces a newer one",
        "link.py",
        "if not self._current(message.epoch) or message.revision <= self.revision:",
        "if not self._current(message.epoch):",
        LINK,
    ),
    Mutant(
        "messages of another epoch count",
        "link.py",
        'if epoch == self.epoch and self.phase == "joined":',
        'if self.phase == "joined":',
        LINK,
    ),
    Mutant(
        "an allowance that was refused is tried again",
        "link.py",
        'return self.phase == "joined" and self.revision > self.blocked_revision',
        'return self.phase == "joined"',
        LINK,
        PREPARE_FAILS,
    ),
    Mutant(
        "without an arbiter the old allowance may still be spent",
        "link.py",
        '        self.phase = "lost"\n        self.allowance = held\n',
        '        self.phase = "lost"\n',
        LINK,
        ARBITER_GONE,
    ),
    Mutant(
        "reports of another epoch count",
        "arbitration.py",
        "return report.epoch == self.epoch and seen <= instance.account.revision",
        "return seen <= instance.account.revision",
        ARBITRATION,
    ),
    Mutant(
        "an older report replaces a newer one",
        "ledger.py",
        "        if report.revision <= self.report.revision:\n            return False\n",
        "",
        LEDGER,
    ),
    Mutant(
        "an allowance nobody confirmed is not booked",
        "ledger.py",
        "return max(self.held, *self._sent.values(), 0)",
        "return max(self.held, self.allowance)",
        LEDGER,
    ),
    Mutant(
        "a second report leaves before the first was confirmed",
        "reports.py",
        "        if self.outstanding:\n            return\n        self._stop_timer(effects)",
        "        self._stop_timer(effects)",
        GROUP,
    ),
    # --- conservation and order among instances ---
    Mutant(
        "what a dead instance held is free before the device shows it",
        "ledger.py",
        "        self.foreign_bytes += held_bytes\n",
        "        pass\n",
        (*LEDGER, *ARBITRATION),
        WORKER_DIES,
    ),
    Mutant(
        "a reading taken amid operations is believed",
        "ledger.py",
        "self._correct(min(max(self.foreign_bytes, low), high))",
        "self._correct(low)",
        LEDGER,
        FOREIGN_MEMORY,
    ),
    Mutant(
        "a device that was refused gives on",
        "policy.py",
        "                self.available[device] = min(self.available[device], 0)\n",
        "                pass\n",
        POLICY,
        PREPARE_FAILS,
    ),
    Mutant(
        "unfilled floors are given away",
        "policy.py",
        "return self.available[device] - (self.reserved[device] - own)",
        "return self.available[device] + 0 * own",
        POLICY,
    ),
    Mutant(
        "a need is met on some devices",
        "policy.py",
        "if c.refused or blocked or any(lack > 0 for lack in missing.values()):",
        "if c.refused or blocked or all(lack > 0 for lack in missing.values()):",
        POLICY,
    ),
    Mutant(
        "an earmark lapses at once",
        "policy.py",
        "blocked = bool(self.plan.pressed & set(c.cost)) and goal > self.floor[c.id]",
        "blocked = False",
        POLICY,
    ),
    Mutant(
        "victims are asked below their floor",
        "policy.py",
        "most = min(offer, v.kept - self.floor[v.id]) - taken",
        "most = min(offer, v.kept) - taken",
        POLICY,
    ),
    Mutant(
        "a late victim is asked for ever",
        "policy.py",
        "if v.id != c.id and not v.late and v.id not in self.granted and set(v.cost) & set(lack)",
        "if v.id != c.id and v.id not in self.granted and set(v.cost) & set(lack)",
        POLICY,
        WORKER_STOPPED,
    ),
    # --- what devices showed, and when ---
    Mutant(
        "a reading from before the newest one corrects the books",
        "ledger.py",
        "        if reading.at_s < self._read_at_s:\n            return False\n",
        "",
        LEDGER,
    ),
    Mutant(
        "a late answer's reading takes the place of a newer one",
        "reports.py",
        "if known is not None and reading.at_s < known.at_s:",
        "if False:",
        GROUP,
    ),
    Mutant(
        "a reading that is not used ends a cap all the same",
        "arbitration.py",
        "elections.elect({reading.device}, effects)\n                continue\n",
        "elections.elect({reading.device}, effects)\n",
        ARBITRATION,
    ),
    Mutant(
        "a clock that is ahead makes all later readings old",
        "arbitration.py",
        "at_s=min(reading.at_s, now_s)",
        "at_s=reading.at_s",
        ARBITRATION,
    ),
    Mutant(
        "what the dead had is read for as seldom as what is foreign",
        "elections.py",
        "if b.unshown_bytes and b.reads_left and not b.capped}",
        "if False and b.unshown_bytes}",
        ARBITRATION,
    ),
    Mutant(
        "a new arbiter gives away before all that live have reported",
        "arbitration.py",
        "        if not self._awaited and not self._elections.open:\n",
        "        if not self._elections.open:\n",
        ARBITRATION,
        row=ARBITER_GONE,
    ),
    Mutant(
        "an instance grows in a new epoch before its first allowance",
        "link.py",
        "self.allowance, self.blocked_revision = held, 0\n                self.welcomed",
        "self.allowance, self.blocked_revision = held, -1\n                self.welcomed",
        LINK,
    ),
    Mutant(
        "a new arbiter decides before it has read a device",
        "arbitration.py",
        "        if not self._awaited and not self._elections.open:\n",
        "        if not self._awaited:\n",
        ARBITRATION,
    ),
    Mutant(
        "the base of one that joins again is foreign too",
        "arbitration.py",
        "                self.devices[device].claim(base_bytes)",
        "                pass",
        ARBITRATION,
    ),
    Mutant(
        "what one that left was to read nobody reads",
        "elections.py",
        "            del self.open[device]\n        self.elect(unread, effects)\n",
        "            pass\n",
        ARBITRATION,
    ),
    Mutant(
        "in a new epoch one member alone is asked to read",
        "arbitration.py",
        "elect(unread, effects, first=peer)",
        "elect(unread - self._elections.open.keys(), effects)",
        ARBITRATION,
    ),
    Mutant(
        "a stopped rank is asked to read like any other",
        "elections.py",
        " if not self._instances[p].account.report.silent] or able",
        "]",
        ARBITRATION,
    ),
    Mutant(
        "who never comes again is awaited for ever",
        "arbitration.py",
        "                self._gathered = True\n",
        "                pass\n",
        ARBITRATION,
    ),
    Mutant(
        "what the dead had is read for soon for ever",
        "elections.py",
        "            self._devices[device].reads_left -= 1\n",
        "            pass\n",
        ARBITRATION,
    ),
    Mutant(
        "what has been shown back is read for on",
        "ledger.py",
        "self.unshown_bytes = max(0, self.unshown_bytes - back_bytes)",
        "self.unshown_bytes = min(foreign_bytes, self.unshown_bytes)",
        (*LEDGER, *ARBITRATION),
    ),
    # --- the scheduler's side ---
    Mutant(
        "extents leave with blocks of a live window",
        "pool.py",
        "            return empty - self._pins.keys(), cache_only - self._pins.keys()\n",
        "            return empty, cache_only\n",
        POOL,
    ),
    Mutant(
        "cached prefixes leave with their hashes",
        "pool.py",
        "                    evict(block)\n",
        "",
        POOL,
    ),
    Mutant(
        "freed blocks wake no withdrawal",
        "pool.py",
        "        self.num_free_blocks += len(blocks)\n        self.frees += bool(blocks)\n\n"
        "    def get_all",
        "        self.num_free_blocks += len(blocks)\n\n    def get_all",
        ADMISSION,
    ),
    Mutant(
        "an unpinned extent wakes no withdrawal",
        "pool.py",
        "            self.queue.frees += 1\n",
        "",
        ADMISSION,
    ),
    Mutant(
        "an idle engine gives back one step's worth only",
        "admission.py",
        "        while moved and self.pool.resident > self.limit:\n",
        "        while False:\n",
        ADMISSION,
    ),
    Mutant(
        "a running request is held for ever",
        "admission.py",
        "if self.port.hold_until_s <= now_s or self._held_in_a_row >= HELD_STEPS_MAX:",
        "if self.port.hold_until_s <= now_s:",
        ADMISSION,
    ),
    Mutant(
        "the pool is woken before its order is there",
        "port.py",
        "        if isinstance(order, Limit):\n",
        "        self._wake_pool()\n        if isinstance(order, Limit):\n",
        ("tests/unit/test_port.py",),
    ),
    *FAULT_MUTANTS,
)


def main() -> int:
    """Run every mutant, print what killed it, write the report."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", nargs="+", metavar="NAME", help="mutants by a part of their name")
    made.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = made.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(o in m.name for o in options.only)]
    if not chosen:
        made.error(f"no mutant is called {' or '.join(options.only)}")
    rows = []
    for number, mutant in enumerate(chosen, 1):
        began_s = time.monotonic()
        killer = killed_by(mutant)
        took_s = time.monotonic() - began_s
        print(f"{number:3}/{len(chosen)} {took_s:5.1f} s  {mutant.name}: {killer or 'SURVIVES'}")
        rows.append(
            {"name": mutant.name, "file": mutant.file, "row": mutant.row, "killed_by": killer}
        )
    survivors = [row["name"] for row in rows if row["killed_by"] is None]
    print(f"{len(rows) - len(survivors)} of {len(rows)} killed")
    if options.json:
        report = {
            "schema": "kvadmit.mutants/2",
            "commit": commit(),
            "versions": versions(),
            "mutants": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(survivors))


def killed_by(mutant: Mutant) -> str | None:
    """Return the first test that fails over the mutant, None if it survives."""
    with tempfile.TemporaryDirectory(prefix="kvadmit-mutant-") as directory:
        copy = Path(directory) / "kvadmit"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        target = copy / mutant.file
        text = target.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.file} has not exactly once: {mutant.old!r}")
        target.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        status, output = _run_tests([*command, *mutant.tests], directory)
    if status == 0:
        return None
    failed = FAILED.search(output)
    if failed is None:
        raise SystemExit(f"{mutant.name}: the tests did not run\n{output}")
    return failed.group(1)


def _run_tests(command: list[str], package_parent: str) -> tuple[int, str]:
    """Run pytest over the package in `package_parent`; return its status and what it printed.

    A test that fails may leave processes behind: they end with it.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": package_parent, "HYPOTHESIS_PROFILE": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TEST_WAIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output


if __name__ == "__main__":
    sys.exit(main())
