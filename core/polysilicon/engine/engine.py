"""The step loop: it schedules, submits one step ahead of the results, and hands out tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from polysilicon.backend import AdapterWeights, DeviceError, OutOfMemory, PendingTokens
from polysilicon.batch import SampledTokens
from polysilicon.engine.batching import SequenceSampling, StepArrays, build_step
from polysilicon.errors import RequestError
from polysilicon.executor import Executor
from polysilicon.kv.identity import root_identity
from polysilicon.kv.manager import KVManager
from polysilicon.request import FinishReason, Request, RequestOutput, TokenLogprobs
from polysilicon.sampling.rows import SequenceSampler, validate
from polysilicon.scheduler import Policy, Scheduler, Sequence, Step


@dataclasses.dataclass(slots=True, eq=False)
class _Choice:
    """One choice of a request while it lives in the engine."""

    request: Request
    index: int
    scores: list[TokenLogprobs] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A submitted step whose tokens have not come back."""

    step: Step
    fence: int
    arrays: StepArrays
    pending: PendingTokens


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
    ) -> None:
        self.executor = executor
        self.kv = kv
        self.scheduler = Scheduler(kv=kv, step_tokens=step_tokens, max_length=max_length)
        self.eos_ids = eos_ids
        self.max_length = max_length
        self.counts = EngineCounts()
        self.failure: str | None = None
        self._policy = Policy()
        self._model_identity = model_identity
        self._kv_dtype = kv_dtype
        self._free_adapter_slots = list(range(max_adapters, 0, -1))
        self._adapters: dict[str, tuple[int, str]] = {}
        self._depth = 2 if run_ahead else 1
        self._in_flight: deque[_InFlight] = deque()
        self._choices: dict[Sequence, _Choice] = {}
        self._samplings: dict[Sequence, SequenceSampling] = {}
        self._requests: dict[str, list[Sequence]] = {}
        self._ended: list[RequestOutput] = []
        self._serial = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_work or self._in_flight or self._ended)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never be served as it stands."""
        if self.failure is not None:
            raise RequestError(f"the engine has ended, restart it: {self.failure}")
        if request.id in self._requests:
            raise RequestError(f"a request with id {request.id!r} is being served already")
        if not request.prompt:
            raise RequestError("the prompt is empty: give at least one token")
        if not all(0 <= token < self.executor.vocab_size for token in request.prompt):
            raise RequestError(
                f"prompt token ids must lie in [0, {self.executor.vocab_size}), the vocabulary"
            )
        params = request.params
        validate(params, self.executor.vocab_size)
        slot, adapter = 0, None
        if request.adapter is not None:
            if request.adapter not in self._adapters:
                loaded = ", ".join(sorted(self._adapters)) or "none"
                raise RequestError(f"no adapter {request.adapter!r} is loaded (loaded: {loaded})")
            slot, adapter = self._adapters[request.adapter]
        root = root_identity(
            model=self._model_identity,
            kv_dtype=self._kv_dtype,
            layout=1,
            adapter=adapter,
            salt=request.salt,
        )
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        arrival = time.monotonic()
        max_tokens = self.max_length if params.max_tokens is None else params.max_tokens
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
                order=self._policy.order(
                    arrival=arrival, priority=request.priority, serial=self._serial
                ),
                max_tokens=max_tokens,
                end_rule=sampler,
                root=root,
                adapter_slot=slot,
                scores_prompt=params.prompt_logprobs is not None and index == 0,
                leader=sequences[0] if sequences else None,
            )
            self._serial += 1
            self.scheduler.add(sequence)
            self._choices[sequence] = _Choice(request, index)
            self._samplings[sequence] = SequenceSampling(
                sampler=sampler, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs
            )
            sequences.append(sequence)
        self._requests[request.id] = sequences

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
        if not self.executor.serves_adapters:
            raise RequestError(
                f"adapter {name!r} cannot be loaded: what runs this model serves no adapters; use "
                "a backend that does, with --executor native"
            )
        if name in self._adapters:
            raise RequestError(f"an adapter {name!r} is loaded already: remove it first")
        if not self._free_adapter_slots:
            raise RequestError("all adapter slots are taken: remove an adapter first")
        slot = self._free_adapter_slots[-1]
        try:
            self.executor.write_adapter(slot, weights)
        except ValueError as error:
            raise RequestError(f"adapter {name!r} does not fit the model: {error}") from error
        self._free_adapter_slots.pop()
        self._adapters[name] = (slot, _adapter_identity(name, weights))

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter. Raises RequestError while requests use it."""
        if name not in self._adapters:
            raise RequestError(f"no adapter {name!r} is loaded")
        slot, _ = self._adapters[name]
        if self._in_flight or any(sequence.adapter_slot == slot for sequence in self._choices):
            raise RequestError(f"adapter {name!r} is in use: wait until its requests have ended")
        del self._adapters[name]
        self.executor.clear_adapter(slot)
        self._free_adapter_slots.append(slot)

    def close(self) -> None:
        self._in_flight.clear()
        self.executor.close()

    def _submit(self) -> bool:
        while (step := self.scheduler.schedule()) is not None:
            last = self._in_flight[-1] if self._in_flight else None
            arrays = build_step(
                step,
                self.kv,
                self._samplings,
                last.arrays.draw_rows if last else {},
                self.executor.vocab_size,
            )
            core = time.perf_counter()
            try:
                pending = self.executor.step(
                    arrays.batch, arrays.sampling, step.copies, last.pending if last else None
                )
            except OutOfMemory:
                if not self.scheduler.retract(step):
                    raise
                continue
            finally:
                self.counts.core_seconds -= time.perf_counter() - core
            fence = self.scheduler.submitted(step)
            for sequence, rows in arrays.score_rows.items():
                sequence.num_scored += len(rows)
            self._in_flight.append(_InFlight(step, fence, arrays, pending))
            return True
        return False

    def _collect(self) -> list[RequestOutput]:
        flight = self._in_flight.popleft()
        result = flight.pending.result()
        began = time.perf_counter()
        self.counts.steps += 1
        for sequence, rows in flight.arrays.score_rows.items():
            if sequence in self._choices:
                choice = self._choices[sequence]
                choice.scores.extend(_prompt_logprobs(result, flight.arrays, rows, choice))
        draw_rows = flight.arrays.draw_rows
        tokens = result.tokens[np.fromiter(draw_rows.values(), np.int32, len(draw_rows))]
        outputs = []
        for sequence, token in self.scheduler.complete(flight.step, flight.fence, tokens):
            choice = self._choices[sequence]
            output = self._output(sequence, choice, result, draw_rows[sequence], token)
            if token is not None:
                self._samplings[sequence].sampler.append(token)
            outputs.append(output)
            if sequence.finish_reason is not None:
                self._forget(sequence)
        self.counts.core_seconds += time.perf_counter() - began
        return outputs

    def _output(
        self,
        sequence: Sequence,
        choice: _Choice,
        result: SampledTokens,
        row: int,
        token: int | None,
    ) -> RequestOutput:
        params = choice.request.params
        first = sequence.num_tokens - sequence.num_prompt == (token is not None)
        if first:
            self.counts.prompt_tokens += sequence.num_prompt - sequence.num_cached
        if token is not None:
            self.counts.output_tokens += 1
        top: tuple[tuple[int, float], ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None:
            top = _top(result, row, params.logprobs)
            if token is not None:
                assert result.logprobs is not None
                logprobs = (TokenLogprobs(id=token, logprob=float(result.logprobs[row]), top=top),)
        return RequestOutput(
            request_id=choice.request.id,
            choice=choice.index,
            ids=() if token is None else (token,),
            logprobs=logprobs,
            prompt_logprobs=tuple(choice.scores) if first else (),
            next_top=top if first else (),
            num_cached_tokens=sequence.num_cached if first else 0,
            finish_reason=sequence.finish_reason,
        )

    def _fail(self, cause: str) -> list[RequestOutput]:
        self.failure = cause
        for sequence in list(self._choices):
            self._end(sequence, FinishReason.ERROR, cause)
        self._in_flight.clear()
        outputs, self._ended = self._ended, []
        return outputs

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        choice = self._choices[sequence]
        self.scheduler.finish(sequence, reason)
        self._ended.append(
            RequestOutput(
                request_id=choice.request.id,
                choice=choice.index,
                finish_reason=reason,
                error=error,
            )
        )
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        choice = self._choices.pop(sequence)
        del self._samplings[sequence]
        rest = self._requests[choice.request.id]
        rest.remove(sequence)
        if not rest:
            del self._requests[choice.request.id]


def _adapter_identity(name: str, weights: AdapterWeights) -> str:
    """What cached KV is named by: the name, and every matrix with the place that it changes."""
    digest = hashlib.sha256(name.encode())
    for target in sorted(weights):
        for index, part in enumerate(weights[target]):
            for matrix in part or ():
                digest.update(repr((target, index, matrix.shape)).encode())
                digest.update(np.ascontiguousarray(matrix, np.float32).tobytes())
    return digest.hexdigest()


def _top(result: SampledTokens, row: int, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely ids of a row of logits with their log-probabilities."""
    if not count:
        return ()
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    ids, values = result.top_ids[row, :count], result.top_logprobs[row, :count]
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _prompt_logprobs(
    result: SampledTokens, arrays: StepArrays, rows: range, choice: _Choice
) -> Iterator[TokenLogprobs]:
    targets, values = arrays.sampling.targets, result.target_logprobs
    assert targets is not None
    assert values is not None
    for row in rows:
        yield TokenLogprobs(
            id=int(targets[row]),
            logprob=float(values[row]),
            top=_top(result, row, choice.request.params.prompt_logprobs or 0),
        )
