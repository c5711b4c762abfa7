"""What a mutant is, and those that take out what a user relies on when something breaks.

The constants are the rows of the failure matrix, as `tests/README.md` names them.
"""

from __future__ import annotations

import msgspec


class Mutant(msgspec.Struct, frozen=True):
    """`old`, once in `file`, becomes `new`. `tests`: what must turn red, from the root.

    `row`: the row of the failure matrix that holds by this guard, "" for none.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    row: str = ""


PREPARE_FAILS = "one rank refuses or fails in PREPARE"
COMMIT_FAILS = "one rank fails in COMMIT, or its answer is lost"
AGENT_SLOW = "an agent's thread is slow"
WORKER_STOPPED = "a worker is stopped"
WORKER_DIES = "a worker dies"
ENGINE_KILLED = "EngineCore or the API server is killed"
ARBITER_GONE = "the arbiter is killed or stopped"
TWO_ARBITERS = "two arbiters on one device"
FOREIGN_MEMORY = "a foreign process takes memory"
RUN_DIRECTORY = "run directory deleted, long TMPDIR, stale files"
UNKNOWN_SIDE = (
    "unknown vLLM, changed hook, vLLM's own extensible KV cache, peer of another protocol version"
)
NO_MPS = "several ranks, a neighbour on the same GPUs, no MPS"
BAD_SETTING = "bad value or unknown key in the settings"

CRASH = "tests/integration/test_crash.py::"
ENABLING = "tests/vllm/test_enabling.py::"

FAULT_MUTANTS = (
    # --- ranks ---
    Mutant(
        "a lost answer is never asked for again",
        "orders.py",
        "        effects.extend(SendAgent(rank, operation.grant) for rank in waiting)\n",
        "",
        ("tests/integration/test_failpoints.py::test_an_answer_lost_there_is_asked_for_again",),
        COMMIT_FAILS,
    ),
    Mutant(
        "a server whose engine died ends as if it had been asked to",
        "vllm/exit_status.py",
        "        died = engine_client.errored and not asked\n",
        "        died = False\n",
        ("tests/vllm/test_exit_status.py",),
        WORKER_DIES,
    ),
    Mutant(
        "a server that is asked to end after its engine died ends with 0",
        "vllm/exit_status.py",
        "        if not engine_client.errored:\n",
        "        if True:\n",
        ("tests/vllm/test_exit_status.py",),
        WORKER_DIES,
    ),
    Mutant(
        "nobody is told which rank is slow",
        "orders.py",
        "            if operation.repeats > 0:\n",
        "            if False:\n",
        (CRASH + "test_status_names_a_stopped_rank_from_when_it_was_asked_again_until_it_goes_on",),
        AGENT_SLOW,
    ),
    Mutant(
        "the reclaim deadline never passes to the next victim",
        "arbitration.py",
        "                        instance.late = True\n",
        "                        instance.late = False\n",
        (CRASH + "test_who_does_not_give_back_is_passed_over",),
        WORKER_STOPPED,
    ),
    Mutant(
        "an engine goes on without one of its ranks",
        "group.py",
        "                if not self.stopping:\n"
        '                    effects.append(EngineLost(f"rank {event.rank}',
        "                if False:\n"
        '                    effects.append(EngineLost(f"rank {event.rank}',
        (CRASH + "test_the_engine_ends_when_a_worker_is_killed",),
        WORKER_DIES,
    ),
    # --- the engine and its front end ---
    Mutant(
        "workers do not heed a closed lease line",
        "member.py",
        '                effects.append(StartTimer("exit", event.now_s + EXIT_GRACE_S))\n',
        "",
        (CRASH + "test_workers_end_when_the_engine_core_is_killed",),
        ENGINE_KILLED,
    ),
    Mutant(
        "a coordinator does not watch its front end",
        "coordinator.py",
        "                self._watches.append(ProcessWatch(pid, act))\n",
        "                pass\n",
        (CRASH + "test_the_engine_ends_when_its_front_end_is_killed",),
        ENGINE_KILLED,
    ),
    # --- the arbiter ---
    Mutant(
        "no instance starts a new arbiter for one that is gone",
        "rendezvous.py",
        "        if not await self._launch():\n",
        "        if self.connections or not await self._launch():\n",
        (CRASH + "test_a_killed_arbiter_is_replaced_and_the_books_are_exact",),
        ARBITER_GONE,
    ),
    Mutant(
        "a stopped arbiter is not told from a slow one",
        "rendezvous.py",
        "if is_stopped(pid) else",
        "if False else",
        ("tests/integration/test_arbiter.py::test_status_is_for_any_tool_with_a_lease",),
        ARBITER_GONE,
    ),
    Mutant(
        "doctor does not look for other arbiters",
        "doctor.py",
        'if key == "--run-dir" and not _serves(pid, run_dir, here):',
        "if False:",
        (
            "tests/integration/test_arbiter.py"
            "::test_doctor_names_an_arbiter_of_another_run_directory",
        ),
        TWO_ARBITERS,
    ),
    Mutant(
        "doctor does not look at foreign memory",
        "doctor.py",
        "        if foreign_bytes * FOREIGN_PART > total_bytes:\n",
        "        if False:\n",
        ("tests/unit/test_cli.py::test_doctor_names_devices_of_which_others_hold_much",),
        TWO_ARBITERS,
    ),
    # --- memory and files of others ---
    Mutant(
        "foreign memory is lent all the same",
        "arbitration.py",
        "return book.total_bytes - margin - book.foreign_bytes - base",
        "return book.total_bytes - margin - base",
        (
            "tests/sim/test_machines.py"
            "::test_memory_taken_behind_the_books_is_refused_a_few_times_and_then_known",
        ),
        FOREIGN_MEMORY,
    ),
    Mutant(
        "a start sweeps nothing",
        "coordinator.py",
        "        self._run.sweep()\n",
        "",
        (CRASH + "test_a_killed_instance_leaves_its_memory_to_the_other",),
        RUN_DIRECTORY,
    ),
    Mutant(
        "the arbiter's lock is a file alone",
        "rundir.py",
        "            listener.bind(self._name)\n",
        '            listener.bind("")\n',
        ("tests/integration/test_arbiter.py::test_a_deleted_run_directory_disturbs_nobody",),
        RUN_DIRECTORY,
    ),
    # --- what does not fit together ---
    Mutant(
        "an unknown vLLM is taken for a known one",
        "vllm/shapes.py",
        "    if minor(version) not in minors:\n",
        "    if False:\n",
        (ENABLING + "test_an_unknown_version_names_both_sides",),
        UNKNOWN_SIDE,
    ),
    Mutant(
        "a changed hook is not noticed",
        "vllm/shapes.py",
        "        if shape not in shapes:\n",
        "        if False:\n",
        (ENABLING + "test_a_changed_hook_names_place_and_both_shapes",),
        UNKNOWN_SIDE,
    ),
    Mutant(
        "vLLM's own extensible KV cache may be on",
        "vllm/gates.py",
        "    _extensible,\n    _snapshot,\n",
        "    _snapshot,\n",
        (ENABLING + "test_each_gate_names_its_reason",),
        UNKNOWN_SIDE,
    ),
    Mutant(
        "a message of another protocol version is read",
        "messages.py",
        "    if header.version != PROTOCOL_VERSION:\n",
        "    if False:\n",
        ("tests/integration/test_channel.py::test_other_version_is_named_on_both_sides",),
        UNKNOWN_SIDE,
    ),
    Mutant(
        "several ranks share GPUs without an MPS daemon",
        "membership.py",
        "        if not hello.mps.daemon or hello.mps.daemon != other.mps.daemon:\n",
        "        if False:\n",
        (
            "tests/unit/test_arbitration.py"
            "::test_ranks_that_wait_for_each_other_share_gpus_only_under_one_mps_daemon",
        ),
        NO_MPS,
    ),
    Mutant(
        "an unknown key is passed over",
        "config.py",
        "                raise _unknown_key(key, value)\n",
        "                continue\n",
        ("tests/unit/test_config.py::test_an_unknown_key_lists_the_keys_and_the_nearest",),
        BAD_SETTING,
    ),
    Mutant(
        "a word that is neither true nor false is false",
        "config.py",
        '    raise ConfigError(key, value, "true or false")\n',
        "    return False\n",
        ("tests/unit/test_config.py::test_bad_values_name_the_key_and_what_is_allowed",),
        BAD_SETTING,
    ),
)
