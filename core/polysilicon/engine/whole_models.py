"""Which models run through a whole-model executor, and an engine around one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from polysilicon.backend import DeviceError, OutOfMemory
from polysilicon.config import Config
from polysilicon.engine.engine import Engine
from polysilicon.errors import ConfigError, ModelError, PluginError
from polysilicon.executor import ExecutorProvider, ExecutorSettings
from polysilicon.kv import GroupSpec, KVManager
from polysilicon.models.loading import read_config
from polysilicon.models.registry import is_defined
from polysilicon.plugins import Plugins
from polysilicon.policies import POLICIES
from polysilicon.request import SLO
from polysilicon.selection import AUTO, why_not
from polysilicon.suggest import nearest
from polysilicon.weights.checkpoint import Checkpoint

NATIVE = "native"


def choose_provider(
    config: Config, plugins: Plugins, checkpoint: Checkpoint
) -> ExecutorProvider | None:
    """The executor that `config` asks for, None for the core's own.

    Raises PluginError when the one asked for is missing or cannot run here, ConfigError when it
    does not take such a checkpoint or does not go with `--backend`, and ModelError when nothing
    knows the model's architecture.
    """
    if config.executor == NATIVE:
        return None
    if config.executor == AUTO:
        # Who names a backend wants that one and nothing beside it.
        if config.backend != AUTO or is_defined(checkpoint, plugins.architectures):
            return None
        return _first_that_can(plugins, checkpoint)
    provider = _named(plugins, config.executor)
    if config.backend != AUTO:
        raise ConfigError(
            f"executor {provider.name} brings its own kernels: leave --backend {config.backend} "
            f"out, or take --executor {NATIVE}"
        )
    if checkpoint.format not in provider.formats:
        raise ConfigError(
            f"executor {provider.name} takes {', '.join(sorted(provider.formats))} checkpoints, "
            f"and {checkpoint.path} is {checkpoint.format}: take --executor {NATIVE}"
        )
    reason = why_not(provider)
    if reason is not None:
        raise PluginError(f"executor {provider.name!r} cannot run here: {reason}")
    return provider


def build_whole_model_engine(
    config: Config,
    provider: ExecutorProvider,
    path: Path,
    *,
    identity: str,
    eos_ids: frozenset[int],
) -> tuple[Engine, tuple[str, ...]]:
    """An engine whose steps `provider` runs, and notes for the user.

    Raises ConfigError for settings that the executor cannot serve.
    """
    for name, said in (
        ("--device", config.device),
        ("--deterministic", config.deterministic),
        ("--activations", config.activations),
        ("--quantize", config.quantize),
    ):
        if said:
            raise ConfigError(f"executor {provider.name} does not know {name}: leave it out")
    settings = ExecutorSettings(
        max_sequences=config.max_sequences,
        step_tokens=config.step_tokens,
        max_length=config.max_length,
        page_size=config.page_size,
        kv_pages=config.kv_pages,
        kv_memory=config.kv_memory,
        kv_dtype=config.kv_dtype,
        options=config.backend_option,
    )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            executor = provider.open(path, settings)
    except ValueError as error:
        raise ConfigError(f"executor {provider.name}: {error}") from error
    except (OutOfMemory, MemoryError) as error:
        raise ConfigError(
            f"executor {provider.name}: the model and its KV cache do not fit: {error}; lower "
            "--kv-memory or --max-length"
        ) from error
    except DeviceError as error:
        raise PluginError(f"executor {provider.name} failed: {error}") from error
    kv = KVManager(
        groups=[GroupSpec(name="full", pages=executor.pages, window=None)],
        page_size=executor.page_size,
        max_sequences=executor.max_sequences,
        max_length=executor.max_length,
        prefix_cache=config.prefix_cache,
    )
    engine = Engine(
        executor=executor,
        kv=kv,
        eos_ids=eos_ids,
        step_tokens=config.step_tokens,
        max_length=executor.max_length,
        model_identity=f"{identity}/{executor.max_length}",
        kv_dtype=executor.kv_dtype,
        run_ahead=executor.run_ahead,
        policy=POLICIES[config.policy],
        default_slo=SLO(ttft=config.slo_ttft, tpot=config.slo_tpot),
    )
    return engine, (f"executor {provider.name}: it runs the whole model", *executor.notes)


def _first_that_can(plugins: Plugins, checkpoint: Checkpoint) -> ExecutorProvider | None:
    reasons = []
    for provider in plugins.executors:
        if checkpoint.format in provider.formats:
            reason = why_not(provider)
            if reason is None:
                return provider
            reasons.append(f"executor {provider.name} could try, but {reason}")
    if reasons:
        try:
            read_config(checkpoint, added=plugins.architectures)
        except ModelError as error:
            raise ModelError(f"{error} Or: {'; '.join(reasons)}") from error
    return None


def _named(plugins: Plugins, name: str) -> ExecutorProvider:
    for provider in plugins.executors:
        if provider.name == name:
            return provider
    for record in plugins.records:
        if record.name == name and record.reason:
            raise PluginError(
                f"executor {name!r}: plugin {record.name!r} is {record.status}: {record.reason}"
            )
    known: Sequence[str] = (AUTO, NATIVE, *(provider.name for provider in plugins.executors))
    hint = nearest(name, known) or ": install the plugin that supplies it."
    raise PluginError(f"there is no executor {name!r}{hint} Known: {', '.join(known)}")
