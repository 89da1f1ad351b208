"""`polysilicon backends`: what can run here, and which formats run on it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from polysilicon.backend import Capabilities, DeviceInfo
    from polysilicon.plugins import PluginRecord, Plugins
    from polysilicon.selection import BackendReport


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Show which formats each backend runs.")
    ] = False,
) -> None:
    """List the backends in the order of --backend auto, and the executors of whole models: status,
    devices, capabilities or reason."""
    from polysilicon.plugin_checks import PluginStatus
    from polysilicon.plugins import load_plugins
    from polysilicon.selection import probe_all

    plugins = load_plugins()
    opened = [_open(report) for report in probe_all(plugins)]
    unloaded = [r for r in plugins.records if r.status is not PluginStatus.LOADED]
    if matrix:
        _print_matrix(opened, plugins, as_json)
    elif as_json:
        _print_json(opened, _executors(plugins), unloaded)
    else:
        _print_list(opened, _executors(plugins), unloaded)


_Opened = tuple["BackendReport", "Capabilities | None"]


def _open(report: BackendReport) -> _Opened:
    """A report with the capabilities of the first device; faulty when that cannot be opened."""
    from polysilicon.errors import PluginError
    from polysilicon.selection import BackendStatus, capabilities

    if report.status is not BackendStatus.AVAILABLE:
        return report, None
    try:
        return report, capabilities(report)
    except PluginError as error:
        return (
            dataclasses.replace(report, status=BackendStatus.FAULTY, reason=str(error)),
            None,
        )


def _executors(plugins: Plugins) -> list[dict[str, str]]:
    """Name, status and reason of every whole-model executor."""
    from polysilicon.selection import BackendStatus, why_not

    reasons = [(provider.name, why_not(provider)) for provider in plugins.executors]
    status = {True: BackendStatus.AVAILABLE, False: BackendStatus.UNAVAILABLE}
    return [
        {"name": name, "status": status[reason is None], "reason": reason or ""}
        for name, reason in reasons
    ]


def _print_list(
    opened: list[_Opened], executors: list[dict[str, str]], unloaded: list[PluginRecord]
) -> None:
    from polysilicon.commands.output import print_table

    rows: list[tuple[str, ...]] = [
        (
            report.name,
            report.status,
            "\n".join(map(_device, report.devices)),
            report.reason if declared is None else _summary(declared, report.reason),
        )
        for report, declared in opened
    ]
    rows += [(f"{e['name']} (executor)", e["status"], "", e["reason"]) for e in executors]
    rows += [(f"{record.name} (plugin)", record.status, "", _owned(record)) for record in unloaded]
    print_table(("backend", "status", "devices", "capabilities or reason"), rows)


def _owned(record: PluginRecord) -> str:
    owner = f"{record.distribution} {record.version}".strip()
    return f"{owner}: {record.reason}" if owner else record.reason


def _device(device: DeviceInfo) -> str:
    details = "".join(f", {value}" for value in device.details.values())
    return f"{device.name}, {device.memory / 2**30:.1f} GiB{details}"


def _summary(declared: Capabilities, reason: str) -> str:
    parts = [
        f"compute {declared.compute}",
        f"KV {' '.join(declared.kv_dtypes)}",
        f"pages of {' '.join(map(str, declared.page_sizes))}",
        f"encodings {' '.join(declared.encodings)}",
    ]
    if declared.adapters:
        parts.append(f"{declared.adapters} adapters up to rank {declared.max_adapter_rank}")
    switches = {
        "deterministic": declared.deterministic,
        "tree attention": declared.tree_attention,
        "capture": declared.capture,
        "calibrated KV scales": declared.kv_scales,
    }
    parts += [name for name, on in switches.items() if on]
    return "; ".join([*parts, reason] if reason else parts)


def _print_json(
    opened: list[_Opened], executors: list[dict[str, str]], unloaded: list[PluginRecord]
) -> None:
    from polysilicon.commands.output import print_json

    entries: list[dict[str, Any]] = [
        {
            "name": report.name,
            "status": report.status,
            "reason": report.reason,
            "plugin": report.plugin.name,
            "distribution": report.plugin.distribution,
            "version": report.plugin.version,
            "contract": list(report.backend.contract),
            "priority": report.backend.priority,
            "devices": [
                {"name": d.name, "memory": d.memory, "details": dict(d.details)}
                for d in report.devices
            ],
            "capabilities": None if declared is None else dataclasses.asdict(declared),
        }
        for report, declared in opened
    ]
    owners = [dataclasses.asdict(record) for record in unloaded]
    print_json({"backends": entries, "executors": executors, "unloaded": owners})


def _print_matrix(opened: list[_Opened], plugins: Plugins, as_json: bool) -> None:
    """Formats by backend: of those that run here by what their devices declare, of others by what
    they declared when their lane was last judged; and what came of the lanes."""
    from polysilicon.commands.output import print_json, print_table
    from polysilicon.format_matrix import formats
    from polysilicon.lane_reports import declared, kept_reports, results

    listed = formats(plugins.checkpoint_formats)
    runnable = {report.name: found for report, found in opened if found is not None}
    reasons = {report.name: report.reason for report, found in opened if found is None}
    reports = kept_reports()
    reported = {
        name: found
        for name, report in reports.items()
        if name not in runnable and (found := declared(report)) is not None
    }
    lanes = {
        name: {
            "device": report["device"],
            "shows": report["shows"],
            "tests": results(report),
            "date": report["date"],
        }
        for name, report in reports.items()
    }
    if as_json:
        rows = [
            dataclasses.asdict(item)
            | {"support": {name: item.support(found) for name, found in runnable.items()}}
            | {"reported": {name: item.support(found) for name, found in reported.items()}}
            for item in listed
        ]
        print_json({"formats": rows, "unavailable": reasons, "lanes": lanes})
        return
    columns = runnable | {f"{name}*": found for name, found in reported.items()}
    print_table(
        ("format", "type", "encoding", *columns),
        [
            (
                item.container,
                item.type,
                item.encoding or item.reason,
                *(item.support(found) for found in columns.values()),
            )
            for item in listed
        ],
    )
    for note in dict.fromkeys(item.note for item in listed if item.note):
        types = ", ".join(item.type for item in listed if item.note == note)
        print(f"note: {types}: {note}")
    for name, reason in reasons.items():
        print(f"{name}: {reason}")
    if reported:
        print("*: not here, but as its lane was last judged:")
    for name, lane in lanes.items():
        place = f" on {lane['device']}" if lane["device"] else ""
        print(f"lane {name}: {', '.join(lane['shows'])}{place}, {lane['date']}: {lane['tests']}")
