"""The step loop: it schedules, submits one step ahead of the results, and hands out tokens."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from polysilicon.backend import AdapterWeights, DeviceError, OutOfMemory, PendingTokens
from polysilicon.batch import Float32
from polysilicon.engine.adapters import Adapters
from polysilicon.engine.batching import SequenceSampling, StepArrays, build_step
from polysilicon.engine.checks import check_request
from polysilicon.engine.following import Following
from polysilicon.engine.outputs import Choice
from polysilicon.engine.pooling import Pooling
from polysilicon.engine.stats import EngineStats
from polysilicon.errors import RequestError
from polysilicon.executor import EmbeddingExecutor, Executor
from polysilicon.kv.identity import root_identity
from polysilicon.kv.manager import KVManager
from polysilicon.policies import Claim, Policy, PriorityFirst
from polysilicon.request import (
    SLO,
    FinishReason,
    Request,
    RequestOutput,
)
from polysilicon.sampling.grammar import Grammars, GrammarState
from polysilicon.sampling.rows import SequenceSampler
from polysilicon.scheduler import Scheduler
from polysilicon.sequence import Sequence, Step


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A step whose tokens have not come back. began: when its submission began."""

    step: Step
    fence: int
    arrays: StepArrays
    pending: PendingTokens
    began: float


@dataclasses.dataclass(kw_only=True, slots=True)
class EngineCounts:
    """Counts since the start. core_seconds: time of the core's own work in steps: scheduling, KV
    bookkeeping and the batch's arrays."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    core_seconds: float = 0.0


class Engine:
    """Serves requests on one executor; single-threaded, driven by `step`.

    eos_ids: tokens that end a text. model_identity, kv_dtype: what cached KV is named by.
    run_ahead: submit step n + 1 before step n's tokens are back.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        kv: KVManager,
        eos_ids: frozenset[int],
        step_tokens: int,
        max_length: int,
        model_identity: str,
        kv_dtype: str,
        max_adapters: int = 0,
        run_ahead: bool = True,
        policy: Policy = PriorityFirst(),
        default_slo: SLO = SLO(),
    ) -> None:
        self.executor = executor
        self.kv = kv
        self.scheduler = Scheduler(
            kv=kv, step_tokens=step_tokens, max_length=max_length, policy=policy
        )
        self.eos_ids = eos_ids
        self.max_length = max_length
        self.counts = EngineCounts()
        self.failure: str | None = None
        self._default_slo = default_slo
        self._model_identity = model_identity
        self._kv_dtype = kv_dtype
        self._adapters = Adapters(executor, max_adapters)
        self._depth = 2 if run_ahead else 1
        self._in_flight: deque[_InFlight] = deque()
        self._choices: dict[Sequence, Choice] = {}
        self._samplings: dict[Sequence, SequenceSampling] = {}
        self._requests: dict[str, list[Sequence]] = {}
        self._unscheduled: set[Sequence] = set()
        self._embedding: set[Sequence] = set()
        self._step_seconds: deque[float] = deque(maxlen=1024)
        self._last_result = 0.0
        self._ended: list[RequestOutput] = []
        self._following: Following | None = None
        self._serial = 0

    def serve_grammars(self, grammars: Grammars) -> None:
        """Serve requests with a grammar from now on; `close` closes what compiles them."""
        self._following = Following(grammars, self.scheduler)

    def warm_grammars(self) -> None:
        """Prepare what all grammars share, which would hold up the steps of others later."""
        if self._following is not None:
            self._following.grammars.warm()

    @property
    def has_work(self) -> bool:
        return bool(
            self.scheduler.has_work or self._in_flight or self._ended or self._num_compiling
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never be served as it stands."""
        if self.failure is not None:
            raise RequestError(f"the engine has ended, restart it: {self.failure}")
        if request.id in self._requests:
            raise RequestError(f"a request with id {request.id!r} is being served already")
        check_request(request, vocab_size=self.executor.vocab_size, max_length=self.max_length)
        if request.priority and not self.scheduler.policy.heeds_priority:
            raise RequestError(
                f"priority {request.priority} has no effect under the policy "
                f"{self.scheduler.policy.name}: leave it out, or start with --policy priority"
            )
        if request.grammar is not None and self._following is None:
            raise RequestError("this engine serves no grammars: it has no tokenizer")
        if request.embed is not None and not isinstance(self.executor, EmbeddingExecutor):
            raise RequestError(
                "what runs this model gives no hidden states for embeddings: use --executor native"
            )
        params = request.params
        slot, adapter = self._adapters.find(request.adapter)
        root = root_identity(
            model=self._model_identity,
            kv_dtype=self._kv_dtype,
            layout=1,
            adapter=adapter,
            salt=request.salt,
        )
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        arrival = time.monotonic() if request.arrival is None else request.arrival
        max_tokens = self.max_length if params.max_tokens is None else params.max_tokens
        slo = request.slo or self._default_slo
        sequences: list[Sequence] = []
        for index in range(params.n):
            sampler = SequenceSampler(
                params,
                seed=seed,
                choice=index,
                prompt=request.prompt,
                eos_ids=self.eos_ids,
                vocab_size=self.executor.vocab_size,
            )
            sequence = Sequence(
                request.prompt,
                claim=Claim(
                    arrival=arrival,
                    serial=self._serial,
                    priority=request.priority,
                    ttft=_seconds(slo.ttft),
                    tpot=_seconds(slo.tpot),
                ),
                max_tokens=max_tokens,
                end_rule=sampler,
                root=root,
                adapter_slot=slot,
                scores_prompt=params.prompt_logprobs is not None and index == 0,
                computes_all=request.embed == "mean",
                leader=sequences[0] if sequences else None,
            )
            self._serial += 1
            if request.grammar is None:
                self.scheduler.add(sequence)
            self._choices[sequence] = Choice(request, index, arrival)
            self._unscheduled.add(sequence)
            if request.embed is not None:
                self._choices[sequence].pooling = Pooling(request.embed, len(request.prompt))
                self._embedding.add(sequence)
            self._samplings[sequence] = SequenceSampling(
                sampler=sampler, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs
            )
            sequences.append(sequence)
        self._requests[request.id] = sequences
        if request.grammar is not None:
            assert self._following is not None
            self._following.wait(request.grammar, sequences)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, and free its pages; unknown ids are ignored."""
        for sequence in list(self._requests.get(request_id, ())):
            if choice is None or self._choices[sequence].index == choice:
                self._end(sequence, FinishReason.CANCELLED)

    def step(self) -> list[RequestOutput]:
        """Submit the next step if there is one, and bring in the results that are due.

        When the device is lost every request ends with an error, and so does the engine.
        """
        try:
            return self._step()
        except DeviceError as error:
            return self._fail(f"the device failed: {error}")

    def _step(self) -> list[RequestOutput]:
        if self._following is not None and self._num_compiling:
            self._start_following(self._following)
        began = time.perf_counter()
        submitted = self._submit()
        self.counts.core_seconds += time.perf_counter() - began
        news: list[RequestOutput] = []
        if self._in_flight and (not submitted or len(self._in_flight) >= self._depth):
            news = self._collect()
        ended, self._ended = self._ended, []
        return [*ended, *news]

    def add_adapter(self, name: str, weights: AdapterWeights) -> None:
        """Load a LoRA adapter under a name. Raises RequestError when the name or all slots are
        taken, and when the executor serves none or the weights do not fit the model."""
        self._adapters.add(name, weights)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter. Raises RequestError while requests use it."""
        slot, _ = self._adapters.find(name)
        if self._in_flight or any(sequence.adapter_slot == slot for sequence in self._choices):
            raise RequestError(f"adapter {name!r} is in use: wait until its requests have ended")
        self._adapters.remove(name)

    def stats(self) -> EngineStats:
        """The engine now; `step_seconds` are of the steps since the last call, 1,024 at most."""
        step_seconds = tuple(self._step_seconds)
        self._step_seconds.clear()
        return EngineStats(
            requests=len(self._requests),
            running=len(self.scheduler.running),
            waiting={
                "capacity": len(self.scheduler.waiting),
                "grammar": self._num_compiling,
            },
            kv=self.kv.usage(),
            prefix_queries=self.kv.prefix_queries,
            prefix_hits=self.kv.prefix_hits,
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self.counts.prompt_tokens,
            output_tokens=self.counts.output_tokens,
            steps=self.counts.steps,
            step_seconds=step_seconds,
        )

    def close(self) -> None:
        self._in_flight.clear()
        if self._following is not None:
            self._following.grammars.close()
        self.executor.close()

    @property
    def _num_compiling(self) -> int:
        return self._following.num_waiting if self._following is not None else 0

    def _start_following(self, following: Following) -> None:
        """Queue the sequences whose grammars are compiled; end those whose grammars are refused."""
        idle = not (self.scheduler.has_work or self._in_flight or self._ended)
        for sequences, compiled in following.ready(idle=idle):
            if isinstance(compiled, RequestError):
                for sequence in sequences:
                    self._end(sequence, FinishReason.ERROR, str(compiled), refused=True)
                continue
            started = [(sequence, self._samplings[sequence]) for sequence in sequences]
            for sequence, sampling in started:
                sampling.sampler.follow(GrammarState(compiled.deep_copy()))
                self._choices[sequence].held = following.jump(sequence, sampling)
            ended = dict(following.settle(started))
            for sequence in sequences:
                if sequence in ended or sequence.finish_reason is not None:
                    self._ended += self._forced(sequence, ended)
                else:
                    self.scheduler.add(sequence)

    def _forced(
        self, sequence: Sequence, ended: Mapping[Sequence, str | None]
    ) -> list[RequestOutput]:
        """All news of a sequence that ends before anything of it is computed."""
        choice = self._choices[sequence]
        choice.first_token = time.monotonic()
        self.counts.output_tokens += len(choice.held)
        reason = None if sequence in ended else sequence.finish_reason
        news = RequestOutput(
            request_id=choice.request.id,
            choice=choice.index,
            ids=choice.held,
            finish_reason=reason,
            times=choice.times(sequence, choice.first_token),
        )
        if reason is not None:
            self._forget(sequence)
            return [news]
        return [news, self._ending_grammar(sequence, ended[sequence])]

    def _ending_grammar(self, sequence: Sequence, error: str | None) -> RequestOutput:
        """The last news of a sequence that its grammar ends."""
        if error is not None:
            return self._ending(sequence, FinishReason.ERROR, error, refused=True)
        self.scheduler.finish(sequence, FinishReason.STOP)
        sequence.finish_reason = FinishReason.STOP  # its last token may have been the last allowed
        return self._ending(sequence, FinishReason.STOP)

    def _submit(self) -> bool:
        while (step := self.scheduler.schedule(time.monotonic())) is not None:
            last = self._in_flight[-1] if self._in_flight else None
            arrays = build_step(
                step,
                self.kv,
                self._samplings,
                last.arrays.draw_rows if last else {},
                self.executor.vocab_size,
            )
            core = time.perf_counter()
            previous = last.pending if last else None
            embeds = self._embedding and any(s.sequence in self._embedding for s in step.scheduled)
            states = None
            # Where the device computes at once, the step is done when the call comes back.
            now = time.monotonic()
            try:
                if embeds:
                    assert isinstance(self.executor, EmbeddingExecutor)
                    pending, states = self.executor.embed(
                        arrays.batch, arrays.sampling, step.copies, previous
                    )
                else:
                    pending = self.executor.step(
                        arrays.batch, arrays.sampling, step.copies, previous
                    )
            except OutOfMemory:
                if not self.scheduler.retract(step):
                    raise
                continue
            finally:
                self.counts.core_seconds -= time.perf_counter() - core
            fence = self.scheduler.submitted(step, now)
            if self._unscheduled:
                for share in step.scheduled:
                    if share.sequence in self._unscheduled:
                        self._unscheduled.remove(share.sequence)
                        self._choices[share.sequence].first_scheduled = now
            for sequence, rows in arrays.score_rows.items():
                sequence.num_scored += len(rows)
            if states is not None:
                self._pool(step, arrays, states)
            self._in_flight.append(_InFlight(step, fence, arrays, pending, now))
            return True
        return False

    def _pool(self, step: Step, arrays: StepArrays, states: Float32) -> None:
        """Take a step's hidden states, `[T, D]`, into the embeddings that they are for."""
        for share, start in zip(step.scheduled, arrays.batch.query_start, strict=False):
            pooling = self._choices[share.sequence].pooling
            if pooling is not None:
                pooling.take(states[start : start + share.count], share.start)

    def _collect(self) -> list[RequestOutput]:
        flight = self._in_flight.popleft()
        result = flight.pending.result()
        began = time.perf_counter()
        now = time.monotonic()
        self.counts.steps += 1
        self._step_seconds.append(now - max(flight.began, self._last_result))
        self._last_result = now
        for sequence, rows in flight.arrays.score_rows.items():
            if sequence in self._choices:
                self._choices[sequence].score(result, flight.arrays.sampling, rows)
        draw_rows = flight.arrays.draw_rows
        tokens = result.tokens[np.fromiter(draw_rows.values(), np.int32, len(draw_rows))]
        outputs = []
        grown: list[tuple[Sequence, SequenceSampling]] = []
        news = self.scheduler.complete(flight.step, flight.fence, tokens, now)
        for sequence, token in news:
            choice, sampling = self._choices[sequence], self._samplings[sequence]
            ids: tuple[int, ...] = ()
            if token is not None:
                sampling.sampler.append(token)
                ids = (*choice.held, token)
                choice.held = ()
            reason = sequence.finish_reason
            grammar = sampling.sampler.grammar
            if grammar is not None and reason is not FinishReason.STOP:
                assert self._following is not None
                ids += self._following.jump(sequence, sampling)
                reason = None if grammar.at_end else sequence.finish_reason
                grown.append((sequence, sampling))
            if choice.is_new:
                self.counts.prompt_tokens += sequence.num_prompt - sequence.num_cached
            self.counts.output_tokens += len(ids)
            outputs.append(choice.output(sequence, result, draw_rows[sequence], ids, reason, now))
            if reason is not None:
                self._forget(sequence)
        if grown:
            assert self._following is not None
            for sequence, error in self._following.settle(grown):
                outputs.append(self._ending_grammar(sequence, error))
        self.counts.core_seconds += time.perf_counter() - began
        return outputs

    def _fail(self, cause: str) -> list[RequestOutput]:
        self.failure = cause
        for sequence in list(self._choices):
            self._end(sequence, FinishReason.ERROR, cause)
        self._in_flight.clear()
        outputs, self._ended = self._ended, []
        return outputs

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        refused: bool = False,
    ) -> None:
        self._ended.append(self._ending(sequence, reason, error, refused=refused))

    def _ending(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        refused: bool = False,
    ) -> RequestOutput:
        """End a sequence now, wherever it is. Returns its last news."""
        choice = self._choices[sequence]
        self.scheduler.finish(sequence, reason)
        self._forget(sequence)
        return choice.ending(sequence, reason, error, time.monotonic(), refused=refused)

    def _forget(self, sequence: Sequence) -> None:
        choice = self._choices.pop(sequence)
        del self._samplings[sequence]
        self._unscheduled.discard(sequence)
        self._embedding.discard(sequence)
        rest = self._requests[choice.request.id]
        rest.remove(sequence)
        if not rest:
            del self._requests[choice.request.id]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
