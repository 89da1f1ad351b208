"""Runs load on a server, with a bar on stderr, and shows and writes what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from polysilicon.bench.records import Record
from polysilicon.bench.serve import Result, detailed, measure
from polysilicon.bench.settings import Settings
from polysilicon.bench.tables import load_of, remarks, rows
from polysilicon.bench.target import ServerError, Target
from polysilicon.commands.output import print_json, print_table, write_file

_TEXT_NOTE = "prompts go as words, about one a token: token ids are not taken here"


def run_load(
    settings: Settings, *, as_json: bool, result: Path | None, detail: bool, report: Path | None
) -> None:
    """Run it all; JSON in place of the table with as_json. result, report: files for the JSON,
    with every request's times with `detail`, and for the HTML.

    Raises KeyboardInterrupt after a run that the user ended was reported, and ServerError when
    there is nothing to report.
    """
    results: list[Result] = []
    asyncio.run(_measure(settings, results))
    written = [detailed(entry) if detail else dict(entry.figures) for entry in results]
    figures = written[0] if len(settings.rates) == 1 else written
    if as_json:
        print_json(figures)
    else:
        print_table(("figure", *(load_of(entry) for entry in results)), rows(results))
    for remark in remarks(results):
        print(f"polysilicon: {remark}", file=sys.stderr)
    if result is not None:
        write_file(result, json.dumps(figures, indent=1) + "\n")
    if report is not None:
        from polysilicon.bench.report import render

        write_file(report, render(results))
    if results[-1].run.interrupted:
        raise KeyboardInterrupt
    if not any(entry.figures["completed"] for entry in results):
        raise ServerError("no request completed")


async def _measure(settings: Settings, results: list[Result]) -> None:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=2,
    ) as shown:
        total = len(settings.items) * len(settings.rates)
        bar = shown.add_task("", total=total, failed=0)
        failed = 0

        def found(target: Target) -> None:
            shown.update(bar, description=target.model)
            if target.form_of(settings.items) == "text" and settings.prompt_form == "auto":
                print(f"polysilicon: {_TEXT_NOTE}", file=sys.stderr)

        def done(record: Record) -> None:
            nonlocal failed
            failed += record.failure is not None
            shown.update(bar, advance=1, failed=failed)

        async for result in measure(settings, found=found, done=done):
            results.append(result)
