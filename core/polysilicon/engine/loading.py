"""From a configuration to a running engine."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from polysilicon.backend import KV_DTYPES, Capabilities, Device, DeviceError, OutOfMemory
from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.engine import Engine
from polysilicon.engine.memory import share_memory
from polysilicon.engine.model_executor import ModelExecutor
from polysilicon.engine.whole_models import build_whole_model_engine, choose_provider
from polysilicon.errors import ConfigError, ModelError, PluginError
from polysilicon.kv import GroupSpec, KVManager
from polysilicon.models.loading import load_model
from polysilicon.models.model import Model
from polysilicon.plan.kv import context_capacity
from polysilicon.plugins import Plugins, describe_exception, load_plugins
from polysilicon.policies import POLICIES
from polysilicon.progress import Progress, no_progress
from polysilicon.request import SLO
from polysilicon.sampling.grammar import Grammars
from polysilicon.selection import Selection, select_backend
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.checkpoint import Checkpoint, open_checkpoint
from polysilicon.weights.gguf import GGUFFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A client whose engine runs in this process, and what was decided on the way.

    backend: name of the backend or of the whole-model executor. memory: bytes by purpose, as the
    device declares them.
    notes: sentences worth telling the user, such as the backend chosen or a lowered context.
    """

    client: Client
    engine: Engine
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    backend: str
    memory: Mapping[str, int]
    notes: tuple[str, ...]


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that stands in or beside a checkpoint."""
    if isinstance(checkpoint, GGUFFile):
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_directory(checkpoint.path)


def load(config: Config, path: Path, *, progress: Progress = no_progress) -> Loaded:
    """Open the model at `path` on the configured backend, or in a whole-model executor.

    Raises a PolysiliconError that names the mend for every model, backend and memory setting that
    cannot work.
    """
    plugins = load_plugins(config.block_plugins)
    with contextlib.ExitStack() as undo:
        checkpoint = undo.enter_context(
            open_checkpoint(
                path, quantization=config.quantization, added=plugins.checkpoint_formats
            )
        )
        provider = choose_provider(config, plugins, checkpoint)
        tokenizer = load_tokenizer(checkpoint)
        if provider is None:
            selection = select_backend(plugins, config.backend)
            name = selection.name
            engine, notes = _load_native(
                config, plugins, selection, checkpoint, tokenizer, progress
            )
        else:
            name = provider.name
            with progress(f"loading {path.name}"):
                engine, notes = build_whole_model_engine(
                    config,
                    provider,
                    path,
                    identity=checkpoint.fingerprint(),
                    eos_ids=tokenizer.eos_ids,
                )
        engine.serve_grammars(
            Grammars(tokenizer, vocab_size=engine.executor.vocab_size, eos_ids=engine.eos_ids)
        )
        undo.pop_all()
    return Loaded(
        client=Client(engine, tokenizer),
        engine=engine,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        backend=name,
        memory=_memory(engine),
        notes=notes,
    )


def _memory(engine: Engine) -> Mapping[str, int]:
    executor = engine.executor
    return executor.device.memory().used if isinstance(executor, ModelExecutor) else {}


def _load_native(
    config: Config,
    plugins: Plugins,
    selection: Selection,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    progress: Progress,
) -> tuple[Engine, tuple[str, ...]]:
    """An engine that runs our definition of the model on the configured backend, and notes."""
    with contextlib.ExitStack() as undo:
        device = open_device(config, selection)
        undo.callback(device.close)
        try:
            with progress(f"loading {checkpoint.path.name}") as advance:
                model = load_model(
                    checkpoint,
                    device,
                    max_length=config.max_length,
                    quantize=config.quantize,
                    kv_dtype=_kv_dtype(config, device.capabilities),
                    progress=advance,
                    added=plugins.architectures,
                )
            engine, notes = build_engine(
                config,
                device,
                model,
                # Rotary scalings that depend on the context are settled by the length loaded for.
                identity="/".join(
                    [
                        checkpoint.fingerprint(),
                        str(model.config.max_length),
                        *([config.quantize] if config.quantize else []),
                    ]
                ),
                eos_ids=tokenizer.eos_ids,
            )
        except (OutOfMemory, MemoryError) as error:
            raise ModelError(
                f"{checkpoint.path} does not fit into the memory of backend {selection.name}: "
                f"{error}. Choose a smaller model or quantisation, or another device."
            ) from error
        except DeviceError as error:
            raise PluginError(f"backend {selection.name} failed: {error}") from error
        undo.pop_all()
    return engine, (_chosen(selection, config.device), *model.notes, *notes)


def _chosen(selection: Selection, device: int) -> str:
    chosen = f"backend {selection.name} on {selection.devices[device].name}"
    if not selection.passed_over:
        return chosen
    return f"{chosen} (not {', '.join(selection.passed_over)}: polysilicon backends says why)"


def open_device(config: Config, selection: Selection) -> Device:
    """Open the configured device. Raises ConfigError for an index or option it does not have."""
    if config.device >= len(selection.devices):
        names = ", ".join(f"{i}: {info.name}" for i, info in enumerate(selection.devices))
        raise ConfigError(f"backend {selection.name} has no device {config.device} ({names})")
    options = dict(config.backend_option)
    if config.activations is not None:
        options["activations"] = config.activations
    if config.deterministic:
        options["deterministic"] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            device = selection.backend.open(config.device, options)
    except ValueError as error:
        raise ConfigError(f"backend {selection.name}: {error}") from error
    except Exception as error:
        raise PluginError(
            f"backend {selection.name} cannot open device {config.device}: "
            f"{describe_exception(error)}"
        ) from error
    if not isinstance(device, Device):
        raise PluginError(
            f"backend {selection.name} opened a {type(device).__name__}, which is not a Device: "
            "upgrade its plugin"
        )
    if config.deterministic and not device.capabilities.deterministic:
        device.close()
        raise ConfigError(
            f"backend {selection.name} has no deterministic mode: leave --deterministic out, or "
            "choose a backend that declares it (polysilicon backends)"
        )
    return device


def build_engine(
    config: Config,
    device: Device,
    model: Model,
    *,
    identity: str,
    eos_ids: frozenset[int],
    max_adapters: int = 0,
    max_adapter_rank: int = 16,
    run_ahead: bool = True,
) -> tuple[Engine, tuple[str, ...]]:
    """An engine for a model on a device, and notes for the user. Pools are allocated here."""
    capabilities = device.capabilities
    kv_dtype = _kv_dtype(config, capabilities)
    specs = model.kv_specs(_page_size(config, capabilities), kv_dtype)
    max_length = model.config.max_length
    shares = share_memory(
        config,
        model,
        specs,
        free=device.memory().free,
        max_adapters=max_adapters,
        max_adapter_rank=max_adapter_rank,
    )
    pages, notes = shares.pages, list(shares.notes)
    capacity = context_capacity(specs, pages, config.step_tokens)
    if capacity < max_length:
        notes.append(
            f"the context is {capacity:,} tokens, not {max_length:,}: the KV pages hold no more "
            "(--kv-memory, --kv-pages)"
        )
        max_length = capacity
    try:
        executor = ModelExecutor(
            device=device,
            model=model,
            specs=specs,
            pages=pages,
            max_sequences=config.max_sequences,
            max_adapters=max_adapters,
            max_adapter_rank=max_adapter_rank,
        )
        kv = KVManager(
            groups=[
                GroupSpec(name=spec.name, pages=count, window=spec.window)
                for spec, count in zip(specs, pages, strict=True)
            ],
            page_size=specs[0].page_size,
            max_sequences=config.max_sequences,
            max_length=max_length,
            prefix_cache=config.prefix_cache,
        )
    except (OutOfMemory, MemoryError) as error:
        raise ConfigError(
            f"the KV cache does not fit: {error}; lower --kv-memory, --kv-pages, --max-sequences "
            "or --max-length"
        ) from error
    engine = Engine(
        executor=executor,
        kv=kv,
        eos_ids=eos_ids,
        step_tokens=config.step_tokens,
        max_length=max_length,
        model_identity=identity,
        kv_dtype=kv_dtype,
        max_adapters=max_adapters,
        run_ahead=run_ahead,
        policy=POLICIES[config.policy],
        default_slo=SLO(ttft=config.slo_ttft, tpot=config.slo_tpot),
    )
    return engine, tuple(notes)


def _kv_dtype(config: Config, capabilities: Capabilities) -> str:
    wanted = config.kv_dtype or capabilities.kv_dtypes[0]
    if wanted not in KV_DTYPES or wanted not in capabilities.kv_dtypes:
        raise ConfigError(
            f"--kv-dtype {wanted} is not one of this backend's: {', '.join(capabilities.kv_dtypes)}"
        )
    return wanted


def _page_size(config: Config, capabilities: Capabilities) -> int:
    wanted = config.page_size or capabilities.page_sizes[0]
    if wanted not in capabilities.page_sizes:
        sizes = ", ".join(map(str, capabilities.page_sizes))
        raise ConfigError(f"--page-size {wanted} is not one of this backend's: {sizes}")
    return wanted
