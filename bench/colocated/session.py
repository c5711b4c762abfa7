"""All runs of a bench, in order, with a progress bar.

Owns: the loop over runs and what the user sees meanwhile. Must not know: what a run does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from bench.colocated.conductor import Conductor
from bench.colocated.crew import Crew
from bench.colocated.order import interleave, missing
from bench.colocated.result import ResultFiles
from bench.colocated.setup import Setup
from bench.colocated.workload import Scenario


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: every policy in every scenario, `repeats` times.

    No run begins after `minutes`; None for no end. `site`: variables that instances get on
    this machine.
    """

    setup: Setup
    scenarios: Sequence[Scenario]
    policies: Sequence[str]
    repeats: int
    minutes: float | None = None
    site: Mapping[str, str] = {}


async def run_all(plan: Plan, files: ResultFiles, console: Console, out: Path) -> int:
    """Make every run that `files` lacks and add it there; returns how many are still missing.

    Raises InstanceError when an instance breaks; runs made until then are in `files`.
    """
    setup = plan.setup
    # All scenarios of a policy in a row: its instances are started once for them.
    wanted = [
        (policy, repeat, scenario)
        for policy, repeat in interleave(plan.policies, plan.repeats)
        for scenario in plan.scenarios
    ]
    order = missing(wanted, files.done(setup.engine))
    started_s = time.monotonic()
    requests = setup.shape.requests * setup.shape.instances
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("", total=requests * len(order))

        def tell(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(text)

        async with Crew(setup, out / "logs", tell, plan.site) as crew:
            await crew.assemble(list(dict.fromkeys(policy for policy, _, _ in order)))
            for number, (policy, repeat, scenario) in enumerate(order, 1):
                if plan.minutes is not None and time.monotonic() - started_s > 60 * plan.minutes:
                    return len(order) - number + 1
                fleet = await crew.fleet(policy)
                tell(f"run {number} of {len(order)}: {policy}, {scenario}, repeat {repeat + 1}")
                shape = msgspec.structs.replace(setup.shape, scenario=scenario)
                played = msgspec.structs.replace(setup, shape=shape)
                conductor = Conductor(played, fleet, repeat, lambda: progress.advance(task))
                files.add(await conductor.play())
            progress.update(task, description="stopping instances")
    return 0
