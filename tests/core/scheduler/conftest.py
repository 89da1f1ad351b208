import dataclasses
import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import pytest

from polysilicon.kv.manager import GroupSpec, KVManager
from polysilicon.policies import Claim, Policy, PriorityFirst
from polysilicon.scheduler import Scheduler
from polysilicon.sequence import Sequence, Step


@dataclasses.dataclass
class Ends:
    """Ends at a given number of output tokens; token ids never end it by themselves."""

    at: int
    needs_last_token: bool = False

    def ends(self, token: int, num_output: int) -> bool:
        return num_output + 1 >= self.at


class Simulation:
    """A scheduler and a KV manager without a device: tokens are hashes of what came before, so that
    a sequence's output shows whether it saw exactly its own tokens."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        step_tokens: int = 16,
        max_sequences: int = 8,
        max_length: int = 128,
        ahead: bool = True,
        windows: Items[int | None] = (None,),
        prefix_cache: bool = True,
        check: bool = True,
        policy: Policy = PriorityFirst(),
        step_seconds: Callable[[Step], float] = lambda step: 0.0,
    ) -> None:
        self.kv = KVManager(
            groups=[
                GroupSpec(name=f"group{index}", pages=pages, window=window)
                for index, window in enumerate(windows)
            ],
            page_size=page_size,
            max_sequences=max_sequences,
            max_length=max_length,
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(
            kv=self.kv, step_tokens=step_tokens, max_length=max_length, policy=policy
        )
        self.now = 0.0
        self.step_seconds = step_seconds
        self.depth = 2 if ahead else 1
        self.check = check
        self.in_flight: list[tuple[Step, int]] = []
        self.steps: list[Step] = []
        self.finished: list[Sequence] = []
        self.serial = 0
        self.preemptions_per_step: list[int] = []

    def add(
        self,
        prompt: Items[int],
        output: int,
        *,
        arrival: float = 0.0,
        priority: int = 0,
        waits: bool = False,
        leader: Sequence | None = None,
        max_tokens: int = 10_000,
        scores_prompt: bool = False,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Sequence:
        sequence = Sequence(
            prompt,
            claim=Claim(
                arrival=arrival, serial=self.serial, priority=priority, ttft=ttft, tpot=tpot
            ),
            max_tokens=max_tokens,
            end_rule=Ends(output, waits),
            leader=leader,
            scores_prompt=scores_prompt,
        )
        self.serial += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step | None:
        before = self.scheduler.num_preemptions
        step = self.scheduler.schedule(self.now)
        self.preemptions_per_step.append(self.scheduler.num_preemptions - before)
        if step is not None:
            for share in step.scheduled:
                self._check_share(share.sequence, share.start, share.count)
            self.in_flight.append((step, self.scheduler.submitted(step, self.now)))
            self.steps.append(step)
        if self.in_flight and (step is None or len(self.in_flight) >= self.depth):
            self._complete()
        if self.check:
            self.kv.check_integrity()
        return step

    def _check_share(self, sequence: Sequence, start: int, count: int) -> None:
        assert sequence.kv is not None
        assert count >= 1
        assert start == sequence.num_computed
        assert start + count <= sequence.length
        first = start // self.kv.page_size
        last = (start + count - 1) // self.kv.page_size
        for table in self.kv.page_tables:
            assert (table[sequence.kv.row, first : last + 1] > 0).all()

    def _complete(self) -> None:
        step, fence = self.in_flight.pop(0)
        self.now += self.step_seconds(step)
        tokens = [next_token(share.sequence.tokens) for share in step.scheduled if share.samples]
        for sequence, _ in self.scheduler.complete(
            step, fence, np.array(tokens, np.int32), self.now
        ):
            if sequence.finish_reason is not None:
                self.finished.append(sequence)

    def run(self, limit: int = 20_000) -> None:
        while self.scheduler.has_work or self.in_flight:
            assert limit, "the simulation does not end"
            limit -= 1
            self.step()
        self.kv.check_integrity()
        assert all(usage.in_use == usage.limbo == 0 for usage in self.kv.usage())


def next_token(tokens: np.ndarray) -> int:
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32)).digest()
    return int.from_bytes(digest[:2], "little")


def expected_output(prompt: Items[int], output: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(next_token(np.array(tokens)))
    return tokens[len(prompt) :]


@pytest.fixture
def simulate() -> Callable[..., Simulation]:
    return Simulation


@pytest.fixture
def expected() -> Callable[[Items[int], int], list[int]]:
    return expected_output
