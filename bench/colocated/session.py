"""All runs of a bench, in order, with a progress bar.

Owns: the loop over runs and what the user sees meanwhile. Must not know: what a run does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


async def run_all(
    setup: Setup,
    policies: Sequence[str],
    repeats: int,
    files: ResultFiles,
    console: Console,
    out: Path,
) -> None:
    """Make every run that `files` lacks and add it there.

    Raises InstanceError when an instance breaks; runs made until then are in `files`.
    """
    done = files.done(setup.shape.scenario, setup.engine)
    order = missing(interleave(policies, repeats), done)
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

        async with Crew(setup, out / "logs", tell) as crew:
            for number, (policy, repeat) in enumerate(order, 1):
                fleet = await crew.fleet(policy)
                tell(f"run {number} of {len(order)}: {policy}, repeat {repeat + 1}")
                conductor = Conductor(setup, fleet, repeat, lambda: progress.advance(task))
                files.add(await conductor.play())
            progress.update(task, description="stopping instances")
