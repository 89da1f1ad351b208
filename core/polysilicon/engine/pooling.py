"""Embeddings: a prompt's hidden states as one vector."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class Pooling:
    """Takes a prompt's hidden states as steps compute them, and pools them in float64.

    kind: the mean over all tokens, or the state of the last one.
    """

    def __init__(self, kind: Literal["mean", "last"], num_prompt: int) -> None:
        self._kind = kind
        self._num_prompt = num_prompt
        self._num_taken = 0
        self._sum: npt.NDArray[np.float64] | None = None

    def take(self, states: Float32, start: int) -> None:
        """States `[count, D]` of the tokens from position `start` on; those that were taken before,
        by a step that a preemption undid, are passed over."""
        stop = min(start + len(states), self._num_prompt)
        first = max(start, self._num_taken)
        if self._kind == "last":
            first = max(first, self._num_prompt - 1)
        if first >= stop:
            return
        assert self._kind == "last" or first == self._num_taken, "states of some tokens are missing"
        new = states[first - start : stop - start].sum(axis=0, dtype=np.float64)
        self._sum = new if self._sum is None else self._sum + new
        self._num_taken = stop

    def result(self) -> tuple[float, ...]:
        """The embedding, D numbers, rounded to float32; once every token was taken."""
        assert self._sum is not None
        assert self._num_taken == self._num_prompt
        count = self._num_prompt if self._kind == "mean" else 1
        return tuple((self._sum / count).astype(np.float32).tolist())
