"""The entry point of the llama.cpp executor."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polysilicon.backend import Unavailable, hookimpl

if TYPE_CHECKING:
    from polysilicon.executor import ExecutorProvider, ExecutorSettings, WholeModelExecutor


class LlamaCppProvider:
    """llama.cpp through llama-cpp-python."""

    name = "llamacpp"
    contract = (1, 0)
    formats = frozenset({"gguf"})

    def probe(self) -> Unavailable | None:
        if importlib.util.find_spec("llama_cpp") is None:
            return Unavailable(
                reason="llama-cpp-python is not installed: pip install 'polysilicon[llamacpp]'"
            )
        from polysilicon_llamacpp.library import LibraryError, check

        try:
            check()
        except LibraryError as error:
            return Unavailable(reason=str(error))
        return None

    def open(self, path: Path, settings: ExecutorSettings) -> WholeModelExecutor:
        from polysilicon_llamacpp.loading import load

        return load(path, settings)


@hookimpl
def polysilicon_executors() -> Sequence[ExecutorProvider]:
    return (LlamaCppProvider(),)
