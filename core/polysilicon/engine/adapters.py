"""LoRA adapters by name: which slot of the executor holds which, and what names their KV."""

from __future__ import annotations

import hashlib

import numpy as np

from polysilicon.backend import AdapterWeights
from polysilicon.errors import RequestError
from polysilicon.executor import Executor


class Adapters:
    """The adapters that are loaded, at most `slots`. Slot 0 is no adapter."""

    def __init__(self, executor: Executor, slots: int) -> None:
        self._executor = executor
        self._free = list(range(slots, 0, -1))
        self._loaded: dict[str, tuple[int, str]] = {}

    def find(self, name: str | None) -> tuple[int, str | None]:
        """Slot and identity of an adapter; 0 and None without one. Raises RequestError."""
        if name is None:
            return 0, None
        if name not in self._loaded:
            loaded = ", ".join(sorted(self._loaded)) or "none"
            raise RequestError(f"no adapter {name!r} is loaded (loaded: {loaded})")
        return self._loaded[name]

    def add(self, name: str, weights: AdapterWeights) -> None:
        """Load an adapter. Raises RequestError when the name or all slots are taken, and when the
        executor serves none or the weights do not fit the model."""
        if not self._executor.serves_adapters:
            raise RequestError(
                f"adapter {name!r} cannot be loaded: what runs this model serves no adapters; use "
                "a backend that does, with --executor native"
            )
        if name in self._loaded:
            raise RequestError(f"an adapter {name!r} is loaded already: remove it first")
        if not self._free:
            raise RequestError("all adapter slots are taken: remove an adapter first")
        slot = self._free[-1]
        try:
            self._executor.write_adapter(slot, weights)
        except ValueError as error:
            raise RequestError(f"adapter {name!r} does not fit the model: {error}") from error
        self._free.pop()
        self._loaded[name] = (slot, _identity(name, weights))

    def remove(self, name: str) -> None:
        """Unload an adapter that no request uses. Raises RequestError when it is not loaded."""
        slot, _ = self.find(name)
        del self._loaded[name]
        self._executor.clear_adapter(slot)
        self._free.append(slot)


def _identity(name: str, weights: AdapterWeights) -> str:
    """What cached KV is named by: the name, and every matrix with the place that it changes."""
    digest = hashlib.sha256(name.encode())
    for target in sorted(weights):
        for index, part in enumerate(weights[target]):
            for matrix in part or ():
                digest.update(repr((target, index, matrix.shape)).encode())
                digest.update(np.ascontiguousarray(matrix, np.float32).tobytes())
    return digest.hexdigest()
