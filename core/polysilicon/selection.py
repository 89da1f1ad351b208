"""Which backends can run here, and which one is taken."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence

from polysilicon.backend import Backend, Capabilities, DeviceInfo, Unavailable
from polysilicon.errors import PluginError
from polysilicon.executor import ExecutorProvider
from polysilicon.plugins import PluginRecord, Plugins, describe_exception
from polysilicon.suggest import nearest

AUTO = "auto"
_FIRST = ("cuda", "rocm", "metal")
_LAST = ("cpu", "reference")


class BackendStatus(enum.StrEnum):
    """Whether a backend can run: `faulty` when its own code failed."""

    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"
    FAULTY = "faulty"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendReport:
    """What a backend's probe said. reason: why it cannot run, or `auto` does not take it; empty
    when it does."""

    name: str
    backend: Backend
    plugin: PluginRecord
    status: BackendStatus
    devices: tuple[DeviceInfo, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The backend taken and its devices. passed_over: names of those before it that `auto` did not
    take."""

    backend: Backend
    devices: tuple[DeviceInfo, ...]
    passed_over: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.backend.name


def in_order(backends: Sequence[Backend]) -> list[Backend]:
    """The order of `--backend auto`: cuda, rocm, metal, third parties by falling priority and then
    by name, cpu, reference."""

    def rank(backend: Backend) -> tuple[int, int, str]:
        if backend.name in _FIRST:
            return _FIRST.index(backend.name), 0, ""
        if backend.name in _LAST:
            return len(_FIRST) + 1 + _LAST.index(backend.name), 0, ""
        return len(_FIRST), -backend.priority, backend.name

    return sorted(backends, key=rank)


def probe(backend: Backend, plugin: PluginRecord) -> BackendReport:
    """Ask a backend what it can run on. Never raises for the backend's sake."""
    status, reason = BackendStatus.AVAILABLE, ""
    devices: tuple[DeviceInfo, ...] = ()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = backend.probe()
        if isinstance(found, Unavailable):
            status, reason = BackendStatus.UNAVAILABLE, str(found.reason)
        elif not isinstance(found, (list, tuple)) or not all(map(_is_device, found)):
            status = BackendStatus.FAULTY
            reason = f"its probe returned {found!r:.80}, not a list of DeviceInfo"
        elif not found:
            status, reason = BackendStatus.UNAVAILABLE, "it found no device"
        else:
            devices = tuple(found)
            if all(info.stand_in for info in devices):
                reason = "computes on the processor in place of its hardware: taken only by name"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        status, reason = BackendStatus.FAULTY, f"its probe failed: {describe_exception(error)}"
    return BackendReport(
        name=backend.name,
        backend=backend,
        plugin=plugin,
        status=status,
        devices=devices,
        reason=reason,
    )


def _is_device(item: object) -> bool:
    return (
        isinstance(item, DeviceInfo)
        and isinstance(item.name, str)
        and isinstance(item.memory, int)
        and all(isinstance(text, str) for text in item.details.values())
    )


def why_not(provider: ExecutorProvider) -> str | None:
    """Why an executor cannot run here, None when it can. Never raises for the executor's sake."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = provider.probe()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"its probe failed: {describe_exception(error)}"
    if found is None:
        return None
    if isinstance(found, Unavailable):
        return str(found.reason)
    return f"its probe returned {found!r:.80}, not Unavailable or None"


def probe_all(plugins: Plugins) -> tuple[BackendReport, ...]:
    """The report of every backend, in the order of `auto`."""
    return tuple(_probe(plugins, backend) for backend in in_order(plugins.backends))


def capabilities(report: BackendReport, options: Mapping[str, str] | None = None) -> Capabilities:
    """What the first device of an available backend declares. Raises PluginError if it cannot."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            device = report.backend.open(0, options or {})
        try:
            declared = device.capabilities
        finally:
            device.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(
            f"backend {report.name!r} cannot open its first device: {describe_exception(error)}"
        ) from error
    if not isinstance(declared, Capabilities):
        raise PluginError(f"backend {report.name!r} declares no Capabilities: upgrade its plugin")
    return declared


def select_backend(plugins: Plugins, name: str = AUTO) -> Selection:
    """Take the named backend, or with `auto` the first that can run.

    Raises PluginError when it is missing, broken, blocked, out of date or cannot run here, saying
    why and what mends it.
    """
    return _select_first(plugins) if name == AUTO else _select_named(plugins, name)


def _probe(plugins: Plugins, backend: Backend) -> BackendReport:
    record = plugins.record_of(backend.name)
    assert record is not None
    return probe(backend, record)


def _select_first(plugins: Plugins) -> Selection:
    passed: dict[str, str] = {}
    for backend in in_order(plugins.backends):
        report = _probe(plugins, backend)
        if report.status is BackendStatus.AVAILABLE and not report.reason:
            return Selection(backend=backend, devices=report.devices, passed_over=tuple(passed))
        passed[report.name] = report.reason
    if not plugins.records:
        raise PluginError(
            "no backend plugin is installed, not even polysilicon's own: polysilicon is not "
            "installed but only on the path, so install it (pip install -e .)"
        )
    broken = [f"plugin {r.name}: {r.reason}" for r in plugins.records if r.reason]
    reasons = [f"{name}: {reason}" for name, reason in passed.items()]
    raise PluginError("no backend can run here. " + ". ".join(reasons + broken))


def _select_named(plugins: Plugins, name: str) -> Selection:
    record = plugins.record_of(name)
    for backend in plugins.backends:
        if backend.name == name:
            report = _probe(plugins, backend)
            if report.status is BackendStatus.AVAILABLE:
                return Selection(backend=backend, devices=report.devices)
            raise PluginError(f"backend {name!r} cannot run here: {report.reason}")
    if record is not None and record.reason:
        owner = f" ({record.distribution} {record.version})" if record.distribution else ""
        raise PluginError(
            f"backend {name!r}: plugin {record.name!r}{owner} is {record.status}: {record.reason}"
        )
    if any(name == provider.name for provider in plugins.executors):
        raise PluginError(f"{name!r} is no backend but an executor: take --executor {name}")
    known = [backend.name for backend in in_order(plugins.backends)]
    if name in _extras():
        raise PluginError(f"backend {name!r} is not installed: pip install 'polysilicon[{name}]'")
    hint = nearest(name, known) or ": install the plugin that supplies it."
    raise PluginError(
        f"backend {name!r} is not installed{hint} Installed: {', '.join(known) or 'none'}"
    )


def _extras() -> list[str]:
    """The extras of the installed polysilicon that name a backend."""
    try:
        declared = importlib.metadata.metadata("polysilicon").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [extra for extra in declared if extra != "test"]
