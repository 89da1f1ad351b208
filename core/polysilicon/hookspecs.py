"""The hooks a plugin implements; `polysilicon.backend.hookimpl` marks its implementations.

A plugin is a module (or any object) named by an entry point of the group `polysilicon`. Its hooks
are called once, when plugins are loaded, and return frozen data; none is called in the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from polysilicon.backend import PROJECT

if TYPE_CHECKING:
    from polysilicon.backend import Backend
    from polysilicon.executor import ExecutorProvider
    from polysilicon.models.architecture import Architecture
    from polysilicon.weights.formats.format import CheckpointFormat

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def polysilicon_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """The backends that the plugin supplies.

    Names are lower case (`[a-z][a-z0-9_-]*`), not `auto`, and not taken by another plugin. The call
    must load no vendor library: `Backend.probe` may.
    """


@hookspec
def polysilicon_architectures() -> Sequence[Architecture]:  # type: ignore[empty-body]
    """The model architectures that the plugin supplies, beside those of the core."""


@hookspec
def polysilicon_checkpoint_formats() -> Sequence[CheckpointFormat]:  # type: ignore[empty-body]
    """The formats of quantised safetensors checkpoints that the plugin reads, beside the core's.

    Names are as those of backends, not `auto`, and not taken by the core or another plugin.
    """


@hookspec
def polysilicon_executors() -> Sequence[ExecutorProvider]:  # type: ignore[empty-body]
    """The whole-model executors that the plugin supplies.

    Names are as those of backends, and neither `auto` nor `native`. The call must load no vendor
    library: `ExecutorProvider.probe` may.
    """
