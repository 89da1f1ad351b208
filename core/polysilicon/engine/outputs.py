"""How the results of a step become news of the choices that they are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from polysilicon.batch import SampledTokens, SamplingBatch
from polysilicon.engine.pooling import Pooling
from polysilicon.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestTimes,
    TokenLogprobs,
)
from polysilicon.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class Choice:
    """One choice of a request while it lives in the engine. is_new: nothing was told of it yet.
    held: tokens that its grammar forced before the first one was sampled, to be told with it.
    scores: log-probabilities of its prompt so far. Times: seconds of time.monotonic()."""

    request: Request
    index: int
    arrival: float
    is_new: bool = True
    held: tuple[int, ...] = ()
    first_scheduled: float | None = None
    first_token: float | None = None
    pooling: Pooling | None = None
    scores: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    def score(self, result: SampledTokens, sampling: SamplingBatch, rows: Iterable[int]) -> None:
        """Take in the log-probabilities of prompt tokens, which a step has in these rows."""
        assert sampling.targets is not None
        assert result.target_logprobs is not None
        count = self.request.params.prompt_logprobs or 0
        for row in rows:
            self.scores.append(
                TokenLogprobs(
                    id=int(sampling.targets[row]),
                    logprob=float(result.target_logprobs[row]),
                    top=_top(result, row, count),
                )
            )

    def output(
        self,
        sequence: Sequence,
        result: SampledTokens,
        row: int,
        ids: tuple[int, ...],
        reason: FinishReason | None,
        now: float,
    ) -> RequestOutput:
        """News of new tokens, whose row of logits is `row`."""
        first, self.is_new = self.is_new, False
        if first and ids:
            self.first_token = now
        params = self.request.params
        top: tuple[tuple[int, float], ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None:
            top = _top(result, row, params.logprobs)
            if ids:
                assert result.logprobs is not None
                [token] = ids
                logprobs = (TokenLogprobs(id=token, logprob=float(result.logprobs[row]), top=top),)
        if not first and reason is None:
            return RequestOutput(
                request_id=self.request.id, choice=self.index, ids=ids, logprobs=logprobs
            )
        return RequestOutput(
            request_id=self.request.id,
            choice=self.index,
            ids=ids,
            logprobs=logprobs,
            prompt_logprobs=tuple(self.scores) if first else (),
            next_top=top if first else (),
            num_cached_tokens=sequence.num_cached if first else 0,
            finish_reason=reason,
            times=self.times(sequence, now),
            embedding=self.pooling.result() if self.pooling and reason else (),
        )

    def ending(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None,
        now: float,
        *,
        refused: bool,
    ) -> RequestOutput:
        """The last news of a choice that ends without a token."""
        return RequestOutput(
            request_id=self.request.id,
            choice=self.index,
            finish_reason=reason,
            error=error,
            refused=refused,
            times=self.times(sequence, now),
        )

    def times(self, sequence: Sequence, now: float) -> RequestTimes:
        return RequestTimes(
            arrival=self.arrival,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            finished=None if sequence.finish_reason is None else now,
            num_preemptions=sequence.num_preemptions,
        )


def _top(result: SampledTokens, row: int, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely ids of a row of logits with their log-probabilities."""
    if not count:
        return ()
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    ids, values = result.top_ids[row, :count], result.top_logprobs[row, :count]
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
