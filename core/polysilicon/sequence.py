"""A sequence as the scheduler sees it, and its share of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from polysilicon.kv.manager import SequenceKV, SlotCopy
from polysilicon.policies import FIRST, Claim, Order
from polysilicon.request import FinishReason

Int32 = npt.NDArray[np.int32]


class EndRule(Protocol):
    """What the scheduler asks about a sequence's tokens."""

    @property
    def needs_last_token(self) -> bool:
        """Whether the host must know the last token before the next one can be sampled."""

    def ends(self, token: int, num_output: int) -> bool:
        """Whether this token, with `num_output` tokens before it, ends the sequence."""


class Sequence:
    """One choice of a request: its tokens, and how far they are computed.

    Positions below `num_tokens` hold known tokens; `num_in_flight` more were sampled by submitted
    steps whose results have not come back. `num_computed` counts tokens whose KV is computed or
    submitted.
    """

    __slots__ = (
        "_tokens",
        "adapter_slot",
        "claim",
        "computes_all",
        "end_rule",
        "finish_reason",
        "kv",
        "late",
        "leader",
        "max_tokens",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_preemptions",
        "num_prompt",
        "num_scored",
        "num_tokens",
        "order",
        "pending_copies",
        "root",
        "scores_prompt",
    )

    def __init__(
        self,
        prompt: Iterable[int],
        *,
        claim: Claim,
        max_tokens: int,
        end_rule: EndRule,
        root: bytes = b"",
        adapter_slot: int = 0,
        scores_prompt: bool = False,
        computes_all: bool = False,
        leader: Sequence | None = None,
    ) -> None:
        """computes_all: no token of the prompt comes from the prefix cache."""
        self._tokens: Int32 = np.fromiter(prompt, np.int32)
        self.num_prompt = self.num_tokens = len(self._tokens)
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.num_scored = 0
        self.claim = claim
        self.order: Order = FIRST
        self.late = False
        self.max_tokens = max_tokens
        self.end_rule = end_rule
        self.root = root
        self.adapter_slot = adapter_slot
        self.scores_prompt = scores_prompt
        self.computes_all = computes_all or scores_prompt
        self.leader = leader
        self.kv: SequenceKV | None = None
        self.pending_copies: tuple[SlotCopy, ...] = ()
        self.finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> Int32:
        """Known tokens, int32 `[num_tokens]`, a view."""
        return self._tokens[: self.num_tokens]

    @property
    def length(self) -> int:
        """Known tokens and those in flight."""
        return self.num_tokens + self.num_in_flight

    @property
    def num_output(self) -> int:
        """Tokens generated, those in flight included."""
        return self.length - self.num_prompt

    def append(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            grown = np.empty(2 * self.num_tokens + 16, np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    def known_computed(self) -> int:
        """Tokens that are both known and computed: what may enter the prefix cache."""
        return min(self.num_tokens, self.num_computed)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """A sequence's share of a step: tokens `[start, start + count)`; `samples` when they reach its
    end, so that the step draws its next token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A proposed step. copies: KV slots to copy before it runs."""

    scheduled: tuple[Scheduled, ...]
    copies: tuple[SlotCopy, ...]
    num_tokens: int
