"""A scheduled step as the flat arrays that a device reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from polysilicon.batch import Batch, SamplingBatch
from polysilicon.kv.manager import KVManager
from polysilicon.sampling.rows import SampleRow, SequenceSampler, build_sampling_batch
from polysilicon.sequence import Scheduled, Sequence, Step

Int32 = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepArrays:
    """What a step gives to a device, and where its results are found.

    draw_rows: for every share that samples, in order, its row of logits.
    score_rows: for every share that scores prompt tokens, its rows, in the order of the tokens.
    """

    batch: Batch
    sampling: SamplingBatch
    draw_rows: Mapping[Sequence, int]
    score_rows: Mapping[Sequence, range]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSampling:
    """How a sequence's logits are read. logprobs, prompt_logprobs: as in SamplingParams."""

    sampler: SequenceSampler
    logprobs: int | None
    prompt_logprobs: int | None


def build_step(
    step: Step,
    kv: KVManager,
    samplings: Mapping[Sequence, SequenceSampling],
    previous_rows: Mapping[Sequence, int],
    vocab_size: int,
) -> StepArrays:
    """Arrays of a step that was scheduled and not yet submitted.

    previous_rows: rows of the step before, by sequence, whose tokens have not come back.
    """
    shares = step.scheduled
    size = len(shares)
    tokens = np.empty(step.num_tokens, np.int32)
    token_source = np.full(step.num_tokens, -1, np.int32)
    starts = np.empty(size, np.int32)
    counts = np.empty(size, np.int32)
    rows = np.empty(size, np.int32)
    adapters = np.empty(size, np.int32)
    logit_rows: list[int] = []
    sample_rows: list[SampleRow] = []
    draw_rows: dict[Sequence, int] = {}
    score_rows: dict[Sequence, range] = {}
    at = 0
    for index, share in enumerate(shares):
        sequence, start, count = share.sequence, share.start, share.count
        assert sequence.kv is not None
        starts[index], counts[index] = start, count
        rows[index], adapters[index] = sequence.kv.row, sequence.adapter_slot
        known = min(count, sequence.num_tokens - start)
        tokens[at : at + known] = sequence.tokens[start : start + known]
        if known < count:
            tokens[at + known] = 0
            token_source[at + known] = previous_rows[sequence]
        sampling = samplings[sequence]
        scored = _scored_positions(share)
        if scored:
            score_rows[sequence] = range(len(logit_rows), len(logit_rows) + len(scored))
            for position in scored:
                logit_rows.append(at + position - start)
                sample_rows.append(
                    SampleRow(
                        sampler=None,
                        position=position + 1,
                        target=int(sequence.tokens[position + 1]),
                        logprobs=sampling.prompt_logprobs,
                    )
                )
        if share.samples:
            draw_rows[sequence] = len(logit_rows)
            logit_rows.append(at + count - 1)
            sample_rows.append(
                SampleRow(
                    sampler=sampling.sampler,
                    position=start + count,
                    num_output=start + count - sequence.num_prompt,
                    logprobs=sampling.logprobs,
                )
            )
        at += count
    query_start = np.zeros(size + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    owner = np.repeat(np.arange(size, dtype=np.int32), counts)
    positions = np.arange(step.num_tokens, dtype=np.int32) - query_start[owner] + starts[owner]
    context_len = starts + counts
    width = -(-int(context_len.max()) // kv.page_size)
    page_tables = tuple(table[rows, :width] for table in kv.page_tables)
    page, offset = np.divmod(positions, np.int32(kv.page_size))
    slots = tuple(table[owner, page] * kv.page_size + offset for table in page_tables)
    batch = Batch(
        tokens=tokens,
        token_source=token_source,
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        page_tables=page_tables,
        slots=slots,
        logit_rows=np.array(logit_rows, np.int32),
        sequence_slot=rows,
        adapter_slot=adapters,
    )
    return StepArrays(
        batch=batch,
        sampling=build_sampling_batch(sample_rows, vocab_size),
        draw_rows=draw_rows,
        score_rows=score_rows,
    )


def _scored_positions(share: Scheduled) -> range:
    """Positions of the share whose logits score the prompt token that follows, once each."""
    sequence = share.sequence
    if not sequence.scores_prompt:
        return range(0)
    first = max(share.start, sequence.num_scored)
    return range(first, max(first, min(share.start + share.count, sequence.num_prompt - 1)))
