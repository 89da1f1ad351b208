"""Discovery of plugins: each entry point is loaded, registered and checked alone.

A plugin that cannot be used is recorded with the reason and never stops the others. The in-tree
backends come in through the same entry points as everybody's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pluggy

from polysilicon import hookspecs
from polysilicon.backend import PROJECT, Backend
from polysilicon.executor import ExecutorProvider
from polysilicon.models.architecture import Architecture
from polysilicon.plugin_checks import (
    PluginStatus,
    RejectedError,
    check_architecture,
    check_backend,
    check_executor,
    check_format,
)
from polysilicon.suggest import nearest
from polysilicon.weights.formats.format import CheckpointFormat

RESTRICTION = "POLYSILICON_PLUGINS"
"""The environment variable that restricts what loads; see `Restriction`."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """One entry point: what it is and what became of it.

    name: of the entry point. distribution, version: who installed it, empty when nobody did.
    reason: why it is not loaded and what mends it, empty when it is. backends, executors,
    checkpoint_formats: names supplied.
    """

    name: str
    distribution: str
    version: str
    status: PluginStatus
    reason: str = ""
    backends: tuple[str, ...] = ()
    executors: tuple[str, ...] = ()
    checkpoint_formats: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plugins:
    """All plugins found, in the order of loading, and what the loaded ones supply."""

    records: tuple[PluginRecord, ...]
    backends: tuple[Backend, ...]
    executors: tuple[ExecutorProvider, ...]
    architectures: tuple[Architecture, ...]
    checkpoint_formats: tuple[CheckpointFormat, ...]

    def record_of(self, backend: str) -> PluginRecord | None:
        """The record that concerns a backend: of its supplier, else of a plugin of that name."""
        for record in self.records:
            if backend in record.backends:
                return record
        named = (record for record in self.records if record.name == backend)
        return next(named, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restriction:
    """Which plugins may load, as `POLYSILICON_PLUGINS` says: comma-separated plugin names.

    `-name` blocks a plugin. Plain names, if there are any, are the only third-party plugins that
    load; an empty value means none of them. In-tree plugins load unless they are blocked.
    """

    allowed: frozenset[str] | None = None
    blocked: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, value: str | None) -> Restriction:
        """None (the variable is not set) restricts nothing."""
        if value is None:
            return cls()
        names = [name.strip() for name in value.split(",") if name.strip()]
        plain = frozenset(name for name in names if not name.startswith("-"))
        minus = frozenset(name[1:].strip() for name in names if name.startswith("-"))
        return cls(allowed=None if minus and not plain else plain, blocked=minus)

    def reason_against(self, name: str, in_tree: bool) -> str:
        """Why plugin `name` may not load; empty when it may."""
        if name in self.blocked:
            return f"blocked by {RESTRICTION}: take -{name} out of it"
        if self.allowed is not None and not in_tree and name not in self.allowed:
            return f"left out by {RESTRICTION}: add {name} to it"
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Candidate:
    """An entry point with its distribution. place: where that is installed."""

    name: str
    distribution: str
    version: str
    place: str
    load: Callable[[], Any]

    @property
    def in_tree(self) -> bool:
        return _normalized(self.distribution) == PROJECT


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Supply:
    backends: tuple[Backend, ...]
    executors: tuple[ExecutorProvider, ...]
    architectures: tuple[Architecture, ...]
    checkpoint_formats: tuple[CheckpointFormat, ...]


def load_plugins(blocked: Collection[str] = ()) -> Plugins:
    """Load every installed plugin that may load. blocked: names that may not (a configuration's).

    Never raises for a plugin's sake, whatever it does; only KeyboardInterrupt passes.
    """
    restriction = Restriction.parse(os.environ.get(RESTRICTION))
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    records: list[PluginRecord] = []
    backends: dict[str, tuple[Backend, _Candidate]] = {}
    executors: dict[str, tuple[ExecutorProvider, _Candidate]] = {}
    architectures: list[Architecture] = []
    formats: dict[str, tuple[CheckpointFormat, _Candidate]] = {}
    loaded: dict[str, _Candidate] = {}
    for candidate in _candidates():
        status, reason = PluginStatus.LOADED, ""
        supply = _Supply(backends=(), executors=(), architectures=(), checkpoint_formats=())
        try:
            _check_admitted(candidate, loaded, restriction, blocked)
            supply = _load(manager, candidate, backends, executors, formats)
        except RejectedError as rejected:
            status, reason = rejected.status, str(rejected)
        else:
            loaded[candidate.name] = candidate
            backends.update((item.name, (item, candidate)) for item in supply.backends)
            executors.update((item.name, (item, candidate)) for item in supply.executors)
            architectures.extend(supply.architectures)
            formats.update((item.name, (item, candidate)) for item in supply.checkpoint_formats)
        records.append(
            PluginRecord(
                name=candidate.name,
                distribution=candidate.distribution,
                version=candidate.version,
                status=status,
                reason=reason,
                backends=tuple(backend.name for backend in supply.backends),
                executors=tuple(executor.name for executor in supply.executors),
                checkpoint_formats=tuple(format.name for format in supply.checkpoint_formats),
            )
        )
    records.extend(_missing(restriction, {record.name for record in records}))
    return Plugins(
        records=tuple(records),
        backends=tuple(backend for backend, _ in backends.values()),
        executors=tuple(executor for executor, _ in executors.values()),
        architectures=tuple(architectures),
        checkpoint_formats=tuple(format for format, _ in formats.values()),
    )


def describe_exception(error: BaseException) -> str:
    """An exception as one line of bounded length."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _candidates() -> Iterator[_Candidate]:
    """Every entry point of the group: in-tree first, then by name and distribution.

    `importlib.metadata.entry_points` keeps the first of two distributions with one name and says
    nothing, so distributions are walked here, in the order of the search path.
    """
    found: dict[tuple[str, ...], _Candidate] = {}
    for distribution in importlib.metadata.distributions():
        try:
            candidates = _entries(distribution)
        except Exception as error:
            candidates = _unreadable(distribution, error)
        for candidate in candidates:
            key = (
                candidate.name,
                _normalized(candidate.distribution),
                candidate.version,
                candidate.place,
            )
            # The same folder may stand on the search path twice.
            found.setdefault(key, candidate)
    # The sort is stable: of one distribution installed twice, the one that Python imports is first.
    order = sorted(
        found.values(), key=lambda c: (not c.in_tree, c.name, _normalized(c.distribution))
    )
    yield from order


def _entries(distribution: importlib.metadata.Distribution) -> list[_Candidate]:
    """The plugins of one distribution. Raises what a damaged installation makes it raise."""
    return [
        _Candidate(
            name=entry.name,
            distribution=distribution.metadata["Name"],
            version=distribution.version,
            place=os.path.realpath(str(distribution.locate_file(""))),
            load=entry.load,
        )
        for entry in distribution.entry_points
        if entry.group == PROJECT
    ]


def _unreadable(
    distribution: importlib.metadata.Distribution, error: Exception
) -> list[_Candidate]:
    """A candidate that fails, for a distribution of plugins whose metadata is damaged."""
    if f"[{PROJECT}]" not in (distribution.read_text("entry_points.txt") or ""):
        return []
    place = os.path.realpath(str(distribution.locate_file("")))

    def load() -> None:
        raise ImportError(
            f"a distribution in {place} has damaged metadata: reinstall it"
        ) from error

    return [_Candidate(name="unreadable", distribution="", version="", place=place, load=load)]


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _check_admitted(
    candidate: _Candidate,
    loaded: dict[str, _Candidate],
    restriction: Restriction,
    blocked: Collection[str],
) -> None:
    if candidate.name in blocked:
        raise RejectedError(PluginStatus.BLOCKED, "blocked by the configuration (block_plugins)")
    reason = restriction.reason_against(candidate.name, candidate.in_tree)
    if reason:
        raise RejectedError(PluginStatus.BLOCKED, reason)
    other = loaded.get(candidate.name)
    if other is None:
        return
    if _normalized(other.distribution) == _normalized(candidate.distribution):
        raise RejectedError(
            PluginStatus.DUPLICATE,
            f"{candidate.distribution} is installed twice: {other.version} in {other.place}, which "
            f"is used, and {candidate.version} in {candidate.place}: uninstall one of them",
        )
    raise RejectedError(
        PluginStatus.DUPLICATE,
        f"{other.distribution} {other.version} has a plugin of the same name, which is used: "
        f"uninstall {other.distribution} or {candidate.distribution}",
    )


def _load(
    manager: pluggy.PluginManager,
    candidate: _Candidate,
    backends: Mapping[str, tuple[Backend, _Candidate]],
    executors: Mapping[str, tuple[ExecutorProvider, _Candidate]],
    formats: Mapping[str, tuple[CheckpointFormat, _Candidate]],
) -> _Supply:
    """Import, register and check one plugin, and call its hooks."""
    plugin = _guarded("cannot be imported", candidate.load)
    if plugin is None:
        raise RejectedError(PluginStatus.FAILED, "its entry point names None, not a module")
    if manager.is_registered(plugin):
        other = manager.get_name(plugin)
        raise RejectedError(PluginStatus.DUPLICATE, f"is the same module as plugin {other!r}")
    _guarded("is refused by pluggy", lambda: manager.register(plugin, candidate.name))
    try:
        _check_hooks(manager, plugin)
        supply = _Supply(
            backends=_collect(manager, plugin, "polysilicon_backends", check_backend),
            executors=_collect(manager, plugin, "polysilicon_executors", check_executor),
            architectures=_collect(
                manager, plugin, "polysilicon_architectures", check_architecture
            ),
            checkpoint_formats=_collect(
                manager, plugin, "polysilicon_checkpoint_formats", check_format
            ),
        )
        _check_names("backend", supply.backends, backends)
        _check_names("executor", supply.executors, executors)
        _check_names("checkpoint format", supply.checkpoint_formats, formats)
    except RejectedError:
        manager.unregister(plugin)
        raise
    return supply


def _guarded(what: str, call: Callable[[], T]) -> T:
    """Run a plugin's code; whatever it raises, sys.exit() included, becomes a `RejectedError`.

    What it prints goes to stderr: stdout is for what the user asked for.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return call()
    except (KeyboardInterrupt, RejectedError):
        raise
    except BaseException as error:
        raise RejectedError(PluginStatus.FAILED, f"{what}: {describe_exception(error)}") from error


def _check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    known = {name for name in vars(hookspecs) if name.startswith("polysilicon_")}
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if not caller.has_spec():
            raise RejectedError(
                PluginStatus.FAILED,
                f"implements an unknown hook {caller.name!r}{nearest(caller.name, known)}",
            )
    if not callers:
        raise RejectedError(
            PluginStatus.FAILED,
            f"implements no hook: mark one of {', '.join(sorted(known))} with "
            "polysilicon.backend.hookimpl",
        )


def _collect(
    manager: pluggy.PluginManager,
    plugin: object,
    hook: str,
    check: Callable[[object], T],
) -> tuple[T, ...]:
    """What one plugin returns from one hook, every item checked."""
    others = [other for other in manager.get_plugins() if other is not plugin]

    def call() -> tuple[T, ...]:
        items: list[T] = []
        for result in manager.subset_hook_caller(hook, others)():
            if not isinstance(result, Sequence) or isinstance(result, (str, bytes)):
                raise RejectedError(
                    PluginStatus.FAILED,
                    f"{hook} returned {type(result).__name__}, not a list or tuple",
                )
            items.extend(check(item) for item in result)
        return tuple(items)

    return _guarded(f"{hook} failed", call)


def _check_names(
    kind: str,
    items: Sequence[Backend | ExecutorProvider | CheckpointFormat],
    taken: Mapping[str, tuple[object, _Candidate]],
) -> None:
    names: set[str] = set()
    for item in items:
        if item.name in names:
            raise RejectedError(PluginStatus.DUPLICATE, f"supplies {kind} {item.name!r} twice")
        names.add(item.name)
        if item.name in taken:
            other = taken[item.name][1]
            raise RejectedError(
                PluginStatus.DUPLICATE,
                f"{kind} {item.name!r} is supplied by plugin {other.name!r} of "
                f"{other.distribution} {other.version}, which is used: uninstall one of them",
            )


def _missing(restriction: Restriction, found: set[str]) -> Iterator[PluginRecord]:
    """Names that the restriction allows but nobody installed."""
    for name in sorted((restriction.allowed or frozenset()) - found):
        yield PluginRecord(
            name=name,
            distribution="",
            version="",
            status=PluginStatus.MISSING,
            reason=f"named in {RESTRICTION} but not installed{nearest(name, found)}",
        )
