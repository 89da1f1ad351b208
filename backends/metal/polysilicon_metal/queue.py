"""The order of a device's calls.

MLX writes into an array in place only where nothing else holds it, and an evaluation in flight
holds all that it reads. So a step that writes KV is built while the step before it runs, and
submitted when that one has ended: submitted earlier, it would copy every pool that it writes to.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from polysilicon.backend import DeviceError, DeviceLost


@dataclasses.dataclass(kw_only=True, eq=False)
class Stage:
    """One call. arrays: what is evaluated. writes: whether pools are written, so that all before it
    must have ended. finish: what is done with the arrays on the host then."""

    arrays: Sequence[mx.array]
    writes: bool
    finish: Callable[[], None] | None = None
    ended: bool = False
    error: DeviceError | None = None


class Queue:
    """Stages in the order of their calls; those before the first one not submitted are in flight.

    The caller holds the device's lock."""

    def __init__(self) -> None:
        self._flying: list[Stage] = []
        self._built: deque[Stage] = deque()
        self._lost: DeviceLost | None = None

    def add(self, stage: Stage) -> Stage:
        self.check()
        self._built.append(stage)
        self._launch()
        return stage

    def wait(self, stage: Stage) -> None:
        """Until it has ended; what was built behind it is submitted then. Raises what it raised."""
        while not stage.ended:
            self._land()
        if stage.error is not None:
            raise stage.error

    def drain(self) -> None:
        """Wait for everything, whatever became of it."""
        while self._flying or self._built:
            self._land()

    def check(self) -> None:
        """Raises DeviceLost once an evaluation has failed: pools that it wrote are gone."""
        if self._lost is not None:
            raise self._lost

    def _launch(self) -> None:
        while self._built and not (self._flying and self._built[0].writes):
            stage = self._built.popleft()
            self._flying.append(stage)
            try:
                self.check()
                submit: Any = mx.async_eval
                submit(*stage.arrays)
            except (DeviceLost, RuntimeError) as error:
                self._fail(stage, error)

    def _land(self) -> None:
        """End everything in flight, and submit what waited for that."""
        flying, self._flying = self._flying, []
        for stage in flying:
            if stage.error is None:
                try:
                    mx.eval(*stage.arrays)
                    if stage.finish is not None:
                        stage.finish()
                except RuntimeError as error:
                    self._fail(stage, error)
            # A pool's array must not be held any more when the next stage writes into it.
            stage.arrays, stage.finish, stage.ended = (), None, True
        self._launch()

    def _fail(self, stage: Stage, error: Exception) -> None:
        if self._lost is None:
            self._lost = DeviceLost(f"MLX failed: {error}")
        stage.error = self._lost
