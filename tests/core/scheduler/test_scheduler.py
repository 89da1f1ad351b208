import itertools
import random

import numpy as np
import pytest

from polysilicon.errors import RequestError
from polysilicon.request import FinishReason
from polysilicon.scheduler import PROMPT_SCORE_ROWS


def test_one_sequence_prefills_in_chunks_and_decodes_one_token_a_step(simulate, expected):
    simulation = simulate(step_tokens=5)
    prompt = list(range(12))
    sequence = simulation.add(prompt, 4)
    simulation.run()
    assert list(sequence.tokens[12:]) == expected(prompt, 4)
    assert sequence.finish_reason is FinishReason.STOP
    counts = [share.count for step in simulation.steps for share in step.scheduled]
    assert counts[:3] == [5, 5, 2]
    assert set(counts[3:]) == {1}


def test_a_step_ahead_is_submitted_before_the_tokens_are_back(simulate):
    simulation = simulate(ahead=True)
    sequence = simulation.add([1, 2, 3], 8)
    simulation.step()
    simulation.step()
    assert sequence.num_computed == 4
    assert sequence.num_tokens == 4
    assert sequence.num_in_flight == 1


def test_a_sequence_that_needs_its_last_token_waits_and_the_others_run_ahead(simulate):
    simulation = simulate(ahead=True)
    waits = simulation.add([1, 2, 3], 6, waits=True)
    ahead = simulation.add([4, 5, 6], 16)
    simulation.run()
    for sequence in (waits, ahead):
        shares = [
            index
            for index, step in enumerate(simulation.steps)
            for share in step.scheduled
            if share.sequence is sequence
        ]
        gaps = {after - before for before, after in itertools.pairwise(shares)}
        assert (gaps == {2}) if sequence is waits else (gaps == {1})


def test_nothing_runs_past_max_tokens_even_one_step_ahead(simulate):
    simulation = simulate(ahead=True)
    sequence = simulation.add([1, 2, 3], 100, max_tokens=5)
    simulation.run()
    assert sequence.num_tokens == 8
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sum(step.num_tokens for step in simulation.steps) == 3 + 4


def test_the_context_ends_a_sequence(simulate):
    simulation = simulate(max_length=16, pages=5)
    sequence = simulation.add(range(10), 100)
    simulation.run()
    assert sequence.num_tokens == 16
    assert sequence.finish_reason is FinishReason.LENGTH


def test_max_tokens_zero_computes_the_prompt_and_draws_nothing(simulate):
    simulation = simulate(max_length=16)
    sequence = simulation.add(range(16), 5, max_tokens=0)
    simulation.run()
    assert sequence.num_tokens == 16
    assert sequence.finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestError, match="17 tokens"):
        simulation.add(range(17), 5, max_tokens=0)


def test_a_prompt_as_long_as_the_context_is_refused(simulate):
    simulation = simulate(max_length=16)
    with pytest.raises(RequestError, match="context of 16"):
        simulation.add(range(16), 1)
    assert not simulation.scheduler.has_work


def test_decodes_go_on_in_every_step_beside_a_long_prompt(simulate):
    simulation = simulate(step_tokens=8, max_length=512, pages=200, prefix_cache=False)
    streams = [simulation.add([i, i + 1], 60) for i in range(4)]
    for _ in range(4):
        simulation.step()
    simulation.add(range(300), 2)
    seen = len(simulation.steps)
    simulation.run()
    for step in simulation.steps[seen : seen + 40]:
        scheduled = [share.sequence for share in step.scheduled]
        assert all(stream in scheduled for stream in streams)
        assert step.num_tokens <= 8


def test_a_budget_below_the_number_of_streams_still_lets_a_prompt_come_nearer(simulate, expected):
    simulation = simulate(step_tokens=1, prefix_cache=False)
    streams = [simulation.add([i], 30) for i in range(3)]
    late = simulation.add(range(50, 60), 3)
    simulation.run()
    assert list(late.tokens[10:]) == expected(range(50, 60), 3)
    assert simulation.finished[0] is late or streams[0].num_tokens == 31
    for step in simulation.steps:
        decodes = sum(share.count == 1 and share.sequence in streams for share in step.scheduled)
        assert step.num_tokens <= max(1, decodes + 1)


def test_sequences_are_admitted_in_the_order_of_arrival_and_priority(simulate):
    simulation = simulate(max_sequences=1)
    late = simulation.add([1], 2, arrival=5.0)
    early = simulation.add([2], 2, arrival=1.0)
    urgent = simulation.add([3], 2, arrival=9.0, priority=-1)
    simulation.run()
    assert simulation.finished == [urgent, early, late]


def test_when_pages_run_out_one_sequence_is_preempted_and_it_is_the_last(simulate, expected):
    simulation = simulate(pages=9, page_size=4, max_length=32, max_sequences=4)
    sequences = [simulation.add([10 * i, 10 * i + 1, 10 * i + 2], 25) for i in range(3)]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert max(simulation.preemptions_per_step) == 1
    assert sequences[0].num_preemptions == 0
    for i, sequence in enumerate(sequences):
        assert list(sequence.tokens[3:]) == expected([10 * i, 10 * i + 1, 10 * i + 2], 25)


def test_a_preempted_sequence_keeps_its_place(simulate):
    simulation = simulate(pages=9, page_size=4, max_length=32, max_sequences=2)
    first, second = (simulation.add([i, i, i], 25, arrival=i) for i in range(2))
    third = simulation.add([7, 7, 7], 25, arrival=2.0)
    simulation.run()
    assert second.num_preemptions > 0
    assert simulation.finished.index(second) < simulation.finished.index(third)
    assert simulation.finished[0] is first


def test_choices_wait_for_the_prompt_of_the_first_and_then_share_it(simulate):
    simulation = simulate(step_tokens=8, max_length=64)
    first = simulation.add(range(30), 4)
    second = simulation.add(range(30), 4, leader=first)
    simulation.run()
    assert first.num_cached == 0
    assert second.num_cached == 28


def test_a_leader_that_is_cancelled_lets_the_others_go(simulate):
    simulation = simulate()
    first = simulation.add(range(30), 4)
    second = simulation.add(range(30), 4, leader=first)
    simulation.scheduler.cancel(first)
    simulation.run()
    assert second.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("steps", range(6))
def test_cancelling_at_any_time_frees_everything(simulate, steps):
    simulation = simulate(step_tokens=4)
    sequence = simulation.add(range(10), 50)
    other = simulation.add(range(20, 25), 3)
    for _ in range(steps):
        simulation.step()
    simulation.scheduler.cancel(sequence)
    simulation.scheduler.cancel(sequence)
    simulation.run()
    assert sequence.finish_reason is FinishReason.CANCELLED
    assert other.finish_reason is FinishReason.STOP


def test_prompt_scores_are_computed_a_bounded_number_of_rows_at_a_time(simulate):
    simulation = simulate(step_tokens=1000, max_length=512, pages=200)
    simulation.add(range(300), 2, scores_prompt=True)
    simulation.run()
    counts = [share.count for step in simulation.steps for share in step.scheduled]
    assert counts[:3] == [PROMPT_SCORE_ROWS, PROMPT_SCORE_ROWS, 300 - 2 * PROMPT_SCORE_ROWS]


def test_retracting_makes_steps_smaller_until_there_is_nothing_to_take_away(simulate):
    simulation = simulate(step_tokens=64)
    sequence = simulation.add(range(40), 2)
    sizes = []
    while True:
        step = simulation.scheduler.schedule(0.0)
        sizes.append(step.num_tokens)
        if not simulation.scheduler.retract(step):
            break
        simulation.kv.check_integrity()
    assert sizes == [40, 20, 10, 5, 2, 1]
    simulation.run()
    assert sequence.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("seed", range(60))
def test_random_workloads_end_with_the_right_tokens(simulate, expected, seed):
    random_ = random.Random(seed)
    max_length = random_.choice([32, 64, 128])
    page_size = random_.choice([1, 3, 4, 16])
    simulation = simulate(
        pages=1 - (-max_length // page_size) + random_.choice([0, 1, 5, 40]),
        page_size=page_size,
        step_tokens=random_.choice([1, 2, 7, 16, 64]),
        max_sequences=random_.choice([1, 2, 5, 9]),
        max_length=max_length,
        ahead=random_.random() < 0.7,
        windows=random_.choice([(None,), (None, 8), (8,), (None, 16)]),
        prefix_cache=random_.random() < 0.7,
    )
    shared = [random_.randrange(5) for _ in range(max_length)]
    added = []
    for arrival in range(random_.randrange(1, 12)):
        size = random_.randrange(1, max_length - 1)
        common = random_.randrange(size)
        prompt = shared[:common] + [random_.randrange(5) for _ in range(size - common)]
        output = random_.randrange(1, max_length - size + 1)
        sequence = simulation.add(
            prompt,
            output,
            arrival=arrival * random_.random(),
            waits=random_.random() < 0.2,
            scores_prompt=random_.random() < 0.1,
        )
        added.append((sequence, prompt, output))
    simulation.run()
    assert max(simulation.preemptions_per_step) <= 1
    for sequence, prompt, output in added:
        assert np.array_equal(sequence.tokens[len(prompt) :], expected(prompt, output))
