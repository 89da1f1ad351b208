"""Continuous batching: which sequences get how many tokens in the next step.

One rule covers chunked prefill, prefix hits and decode: a step gives a sequence tokens so that its
`num_computed` catches up with its `length`. Decodes come first, then prefill chunks and admissions,
all under one token budget. The scheduler is deterministic, knows no clock (arrival times are given)
and no device: `schedule` proposes a step, `submitted` says that it is on its way, `complete` brings
its tokens. Step n + 1 may be scheduled before step n completes.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Iterable

from polysilicon.budget import StepBudget, StepCost
from polysilicon.errors import RequestError
from polysilicon.kv.manager import KVManager
from polysilicon.policies import Order, Policy, PriorityFirst
from polysilicon.request import FinishReason
from polysilicon.sequence import Int32, Scheduled, Sequence, Step

PROMPT_SCORE_ROWS = 128
"""Most prompt tokens of one sequence whose log-probabilities one step computes: each is a row of
logits as wide as the vocabulary."""


def check_length(num_prompt: int, max_tokens: int, max_length: int) -> None:
    """RequestError unless a prompt, and a token of output where one is wanted, fit the context."""
    if num_prompt >= max_length + (max_tokens == 0):
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and with its output it must fit into the context "
            f"of {max_length}: shorten it, or raise --max-length or --kv-memory"
        )


class Scheduler:
    """See the module. Sequences wait in `waiting`, ordered; hold KV in `running`, ordered."""

    def __init__(
        self,
        *,
        kv: KVManager,
        step_tokens: int,
        max_length: int,
        policy: Policy = PriorityFirst(),
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.budget = StepBudget(step_tokens)
        self.cost = StepCost()
        self.max_length = max_length
        self.waiting: list[tuple[Order, Sequence]] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._submitted: deque[float] = deque()
        self._last_ended = -math.inf

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises RequestError when its prompt can never be served."""
        check_length(sequence.num_prompt, sequence.max_tokens, self.max_length)
        sequence.order = self.policy.order(sequence.claim, late=False)
        heapq.heappush(self.waiting, (sequence.order, sequence))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now, wherever it is; its pages are freed."""
        self.finish(sequence, FinishReason.CANCELLED)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.kv is not None:
            self._release(sequence)
        else:
            self.waiting = [item for item in self.waiting if item[1] is not sequence]
            heapq.heapify(self.waiting)

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when nothing can run before a step in flight completes.

        now: seconds, of the clock that `Claim.arrival` was read from.
        """
        if self.policy.guards_slo:
            self._demote(now)
        self._displace()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            if self._may_run(sequence):
                (decodes if self._is_decode(sequence) else prefills).append(sequence)
        del decodes[self.budget.ceiling :]
        self._start_budget(decodes)
        scheduled: dict[Sequence, Scheduled] = {}
        preempted = False
        for sequence in (*decodes, *prefills):
            if sequence.kv is None:
                continue
            count = 1 if self._is_decode(sequence) else self._chunk(sequence)
            if not count:
                continue
            fitting = self._grow(sequence, count)
            if not fitting and not preempted and not self.kv.reclaiming():
                # Who comes last in order gives way; when that is this sequence, it waits.
                victim = next(other for other in reversed(self.running) if other not in scheduled)
                if victim is not sequence:
                    self._preempt(victim)
                    preempted = True
                    fitting = self._grow(sequence, count)
            if fitting:
                scheduled[sequence] = self._take(sequence, fitting)
        if not preempted:
            self._admit(scheduled)
        if not scheduled:
            return None
        shares = tuple(scheduled.values())
        return Step(
            scheduled=shares,
            copies=tuple(copy for share in shares for copy in share.sequence.pending_copies),
            num_tokens=sum(share.count for share in shares),
        )

    def retract(self, step: Step) -> bool:
        """The device had no memory for the step: make the next one smaller. False when this was the
        smallest there is."""
        self.budget.ceiling = max(1, step.num_tokens // 2)
        for share in step.scheduled:
            if share.sequence.pending_copies:
                self._preempt(share.sequence)
        return step.num_tokens > 1

    def submitted(self, step: Step, now: float) -> int:
        """The step was submitted: advance its sequences. Returns the fence for `complete`."""
        fence = self.kv.step_submitted()
        self._submitted.append(now)
        for share in step.scheduled:
            sequence = share.sequence
            sequence.pending_copies = ()
            sequence.num_computed = share.start + share.count
            if share.samples:
                sequence.num_in_flight += 1
            assert sequence.kv is not None
            self.kv.commit(sequence.kv, sequence.tokens, sequence.known_computed())
        return fence

    def complete(
        self, step: Step, fence: int, tokens: Int32, now: float
    ) -> list[tuple[Sequence, int | None]]:
        """The step ended. tokens: int32, one for each share that samples, in order. Returns the
        sequences that got one, and those that wanted none (None); those that ended have their
        `finish_reason` set."""
        self.kv.step_ended(fence)
        self._measure(step, now)
        news: list[tuple[Sequence, int | None]] = []
        row = 0
        for share in step.scheduled:
            if not share.samples:
                continue
            sequence, token = share.sequence, int(tokens[row])
            row += 1
            if sequence.finish_reason is not None:
                continue
            sequence.num_in_flight -= 1
            if sequence.max_tokens == 0:
                self.finish(sequence, FinishReason.LENGTH)
                news.append((sequence, None))
                continue
            known_output = sequence.num_tokens - sequence.num_prompt
            if not known_output and self.policy.guards_slo and self._misses(sequence, now):
                self._set_late(sequence)
            self.append(sequence, token)
            news.append((sequence, token))
        return news

    def append(self, sequence: Sequence, token: int) -> None:
        """Give a sequence its next known token; it ends where the token ends it or it has all that
        it may have. A token that no step drew is computed as a prefill is; nothing may be in flight
        that comes after it."""
        ends = sequence.end_rule.ends(token, sequence.num_tokens - sequence.num_prompt)
        sequence.append(token)
        if ends:
            self.finish(sequence, FinishReason.STOP)
        elif self._is_full(sequence, sequence.num_tokens):
            self.finish(sequence, FinishReason.LENGTH)

    def _is_full(self, sequence: Sequence, length: int) -> bool:
        """Whether a sequence of `length` tokens has all that it may have."""
        return length - sequence.num_prompt >= sequence.max_tokens or length >= self.max_length

    @staticmethod
    def _is_decode(sequence: Sequence) -> bool:
        return sequence.length - sequence.num_computed == 1 and sequence.num_output > 0

    def _may_run(self, sequence: Sequence) -> bool:
        if not sequence.num_in_flight:
            return True
        return not (sequence.end_rule.needs_last_token or self._is_full(sequence, sequence.length))

    def _chunk(self, sequence: Sequence) -> int:
        """Tokens that a prefill may have in this step."""
        count = min(sequence.length - sequence.num_computed, self.budget.left)
        if sequence.scores_prompt and sequence.num_computed < sequence.num_prompt:
            count = min(count, PROMPT_SCORE_ROWS)
        return count

    def _grow(self, sequence: Sequence, count: int) -> int:
        """Get pages for up to `count` more tokens; how many there is room for, down to 0."""
        assert sequence.kv is not None
        while count and not self.kv.grow(sequence.kv, sequence.num_computed + count):
            count //= 2
        return count

    def _take(self, sequence: Sequence, count: int) -> Scheduled:
        if not self._is_decode(sequence):
            self.budget.left -= count
        start = sequence.num_computed
        return Scheduled(
            sequence=sequence, start=start, count=count, samples=start + count == sequence.length
        )

    def _admit(self, scheduled: dict[Sequence, Scheduled]) -> None:
        while self.waiting and self.budget.left:
            sequence = self.waiting[0][1]
            if sequence.num_in_flight or self._waits_for_leader(sequence):
                return
            if self.running and not self._bears(sequence):
                return
            if self.running and not self._has_room():
                return
            kv = self.kv.open(sequence.tokens, sequence.root, reuse=not sequence.computes_all)
            if kv is None:
                return
            heapq.heappop(self.waiting)
            sequence.kv = kv
            sequence.num_computed = kv.num_cached_tokens
            sequence.num_cached = min(kv.num_cached_tokens, sequence.num_prompt)
            sequence.pending_copies = tuple(kv.copies)
            bisect.insort(self.running, sequence, key=_order)
            count = self._grow(sequence, self._chunk(sequence))
            if not count:
                self._preempt(sequence)
                return
            scheduled[sequence] = self._take(sequence, count)

    @staticmethod
    def _waits_for_leader(sequence: Sequence) -> bool:
        """Further choices of a request wait until the first has computed the prompt they share."""
        leader = sequence.leader
        return (
            leader is not None
            and leader.finish_reason is None
            and leader.num_computed < leader.num_prompt
        )

    def _bears(self, sequence: Sequence) -> bool:
        """Whether the sequence may decode beside those that run and go before it: the policy does
        not ask, or their TPOT, and its own, would still be met."""
        if not self.policy.guards_slo or not self.cost.is_known:
            return True
        others = [other for other in self.running if sequence.late or not other.late]
        if not others:
            return True
        target = _tightest_tpot((sequence, *others))
        decodes, context = len(others) + 1, _context(others) + sequence.num_tokens
        return target is None or (
            self.cost.seconds(prefill=0, decodes=decodes, context=context) <= target
        )

    def _has_room(self) -> bool:
        """Whether one more sequence may start: with a row, and a page for each that runs."""
        return bool(self.kv.free_rows) and self._available() > len(self.running)

    def _displace(self) -> None:
        """Preempt the last that runs, where the first that waits lacks room and the policy lets it
        take that place. One at a time: a row comes back when the steps in flight have ended."""
        if not (self.waiting and self.running) or self.kv.limbo_rows:
            return
        sequence, last = self.waiting[0][1], self.running[-1]
        if sequence.late or sequence.num_in_flight or self._has_room():
            return
        if self.policy.displaces(sequence.claim, last.claim, other_late=last.late):
            self._preempt(last)

    def _demote(self, now: float) -> None:
        """Give the place of sequences that can no longer meet their TTFT to those that can."""
        while self.waiting and self._misses(self.waiting[0][1], now):
            _, sequence = heapq.heappop(self.waiting)
            self._set_late(sequence)
            heapq.heappush(self.waiting, (sequence.order, sequence))
        for sequence in [each for each in self.running if self._misses(each, now)]:
            self._set_late(sequence)

    def _set_late(self, sequence: Sequence) -> None:
        running = sequence.kv is not None
        if running:
            self.running.remove(sequence)
        sequence.late = True
        sequence.order = self.policy.order(sequence.claim, late=True)
        if running:
            bisect.insort(self.running, sequence, key=_order)

    def _misses(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence becomes late: its first token cannot come in time any more."""
        deadline = sequence.claim.deadline
        if deadline is None or sequence.late or sequence.num_tokens > sequence.num_prompt:
            return False
        rest = max(sequence.num_prompt - sequence.num_computed, 0)
        if now + self.cost.prefill_seconds(rest) <= deadline:
            return False
        if sequence.kv is None and now <= deadline:
            rest -= self.kv.cached_tokens(sequence.tokens, sequence.root)
        return now + self.cost.prefill_seconds(rest) > deadline

    def _start_budget(self, decodes: list[Sequence]) -> None:
        """Hold back decodes that cost others their TPOT, and so much prefill as does."""
        target = _tightest_tpot(decodes)
        if target is None or not self.cost.is_known:
            self.budget.start(len(decodes))
            return
        while decodes and decodes[-1].late and self._decode_seconds(decodes) > target:
            decodes.pop()
        within = self.cost.prefill_within(target, decodes=len(decodes), context=_context(decodes))
        self.budget.start(len(decodes), within)

    def _decode_seconds(self, decodes: list[Sequence]) -> float:
        return self.cost.seconds(prefill=0, decodes=len(decodes), context=_context(decodes))

    def _measure(self, step: Step, now: float) -> None:
        """Learn from a step that ended: it ran since its submission, or the end of the last."""
        began = max(self._submitted.popleft(), self._last_ended)
        self._last_ended = now
        decodes = [share for share in step.scheduled if share.count == 1]
        self.cost.observe(
            prefill=step.num_tokens - len(decodes),
            decodes=len(decodes),
            context=sum(share.start for share in decodes),
            seconds=now - began,
        )

    def _available(self) -> int:
        """Pages that could be had at once, in the group that has fewest."""
        return min(usage.free + usage.cached for usage in self.kv.usage())

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; it keeps its place in the queue and what stays cached."""
        self._release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        heapq.heappush(self.waiting, (sequence.order, sequence))

    def _release(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self.running.remove(sequence)
        computed = sequence.known_computed()
        if sequence.pending_copies:
            # What was to be copied into the last, partly reused page never was.
            computed -= computed % self.kv.page_size
        self.kv.close(sequence.kv, sequence.tokens, computed)
        sequence.kv = None
        sequence.num_computed = 0
        sequence.pending_copies = ()


def _order(sequence: Sequence) -> Order:
    return sequence.order


def _tightest_tpot(sequences: Iterable[Sequence]) -> float | None:
    """The least TPOT, in seconds, that one of them still counts on."""
    targets = [
        sequence.claim.tpot
        for sequence in sequences
        if sequence.claim.tpot is not None and not sequence.late
    ]
    return min(targets, default=None)


def _context(sequences: Iterable[Sequence]) -> int:
    """KV slots that a decode of each reads."""
    return sum(sequence.num_computed for sequence in sequences)
