import numpy as np
import pytest

from polysilicon.policies import Claim, DeadlineFirst, FirstCome, PriorityFirst


def place(policy, *, late=False, **claim):
    return policy.order(Claim(**claim), late=late)


def test_first_come_heeds_nothing_but_arrival_and_then_the_order_of_submission():
    policy = FirstCome()
    assert place(policy, arrival=1.0, priority=9, serial=7) < place(policy, arrival=2.0, serial=3)
    assert place(policy, arrival=1.0, serial=3) < place(policy, arrival=1.0, serial=7, ttft=0.1)
    assert not policy.displaces(Claim(priority=-5), Claim(), other_late=True)


def test_patience_bounds_how_long_a_low_priority_waits():
    policy = PriorityFirst(patience=10.0)
    low = place(policy, priority=2)
    assert place(policy, arrival=19.0, serial=1) < low
    assert place(policy, arrival=21.0, serial=2) > low


@pytest.mark.parametrize(
    ("priority", "arrival", "other", "displaces"),
    [(-1, 5.0, 0, True), (0, 5.0, 0, False), (0, 5.0, -1, False), (0, 21.0, 1, False)],
)
def test_a_smaller_priority_displaces_unless_patience_has_run_out(
    priority, arrival, other, displaces
):
    claim = Claim(arrival=arrival, priority=priority, serial=1)
    policy = PriorityFirst(patience=10.0)
    assert policy.displaces(claim, Claim(priority=other), other_late=False) is displaces


def test_deadlines_order_by_when_the_first_token_is_due_and_the_late_come_last():
    policy = DeadlineFirst(patience=60.0)
    urgent = place(policy, arrival=10.0, ttft=0.5)
    assert urgent < place(policy, arrival=9.0, ttft=2.0)
    assert place(policy, arrival=9.0, ttft=2.0) < place(policy, arrival=0.0)
    assert place(policy, arrival=0.0) < place(policy, arrival=0.0, ttft=0.5, late=True)


def test_the_late_give_way_to_those_on_time():
    policy = DeadlineFirst()
    assert policy.displaces(Claim(arrival=9.0, ttft=1.0), Claim(ttft=1.0), other_late=True)
    assert not policy.displaces(Claim(arrival=9.0, ttft=1.0), Claim(ttft=1.0), other_late=False)


def seconds_of(step):
    decodes = sum(share.count == 1 for share in step.scheduled)
    return 0.002 + 0.001 * (step.num_tokens - decodes) + 0.002 * decodes


def met(simulation, sequences, first_tokens, *, ttft):
    return sum(
        first_tokens[sequence] - sequence.claim.arrival <= ttft
        for sequence in sequences
        if sequence in first_tokens
    )


def replay(simulation, arrivals, *, ttft, tpot=None):
    """Run requests (arrival, prompt length, output length); first tokens' times by sequence."""
    waiting = sorted(arrivals)
    sequences, first_tokens = [], {}
    while waiting or simulation.scheduler.has_work or simulation.in_flight:
        while waiting and waiting[0][0] <= simulation.now:
            at, prompt, output = waiting.pop(0)
            start = 1000 * len(sequences)
            sequences.append(
                simulation.add(
                    range(start, start + prompt), output, arrival=at, ttft=ttft, tpot=tpot
                )
            )
        if simulation.step() is None and not simulation.in_flight and waiting:
            simulation.now = max(simulation.now, waiting[0][0])
        for sequence in sequences:
            if sequence.num_tokens > sequence.num_prompt:
                first_tokens.setdefault(sequence, simulation.now)
    return sequences, first_tokens


@pytest.fixture
def overloaded(simulate):
    def run(policy):
        simulation = simulate(
            policy=policy,
            step_seconds=seconds_of,
            step_tokens=64,
            pages=400,
            max_sequences=16,
            max_length=256,
            check=False,
        )
        random = np.random.default_rng(3)
        at = np.cumsum(random.exponential(0.05, 150)).tolist()
        arrivals = [(time, int(random.integers(40, 120)), 12) for time in at]
        sequences, first_tokens = replay(simulation, arrivals, ttft=0.5, tpot=0.05)
        return met(simulation, sequences, first_tokens, ttft=0.5)

    return run


def test_under_overload_deadlines_keep_more_promises_than_first_come(overloaded):
    assert overloaded(DeadlineFirst()) > 2 * overloaded(FirstCome())


def test_every_request_is_answered_whatever_the_policy(simulate, expected):
    for policy in (FirstCome(), PriorityFirst(), DeadlineFirst()):
        simulation = simulate(
            policy=policy, step_seconds=seconds_of, pages=20, max_sequences=3, max_length=32
        )
        arrivals = [(0.01 * index, 5 + index % 7, 9) for index in range(25)]
        sequences, _ = replay(simulation, arrivals, ttft=0.05, tpot=0.01)
        for sequence in sequences:
            prompt = list(sequence.tokens[: sequence.num_prompt])
            assert list(sequence.tokens[sequence.num_prompt :]) == expected(prompt, 9)
        assert all(usage.in_use == usage.limbo == 0 for usage in simulation.kv.usage())


def test_an_urgent_request_displaces_a_running_one_which_then_goes_on(simulate, expected):
    simulation = simulate(max_sequences=1, max_length=64)
    slow = simulation.add([1, 2, 3], 30)
    for _ in range(5):
        simulation.step()
    urgent = simulation.add([4, 5], 3, arrival=0.0, priority=-1)
    simulation.run()
    assert simulation.finished == [urgent, slow]
    assert slow.num_preemptions == 1
    assert list(slow.tokens[3:]) == expected([1, 2, 3], 30)


def test_late_decodes_pause_while_they_would_cost_others_their_tpot(simulate):
    simulation = simulate(
        policy=DeadlineFirst(), step_seconds=seconds_of, max_sequences=16, pages=200, check=False
    )
    late = [simulation.add([index] * 3, 100, ttft=1e-6, tpot=1e-6) for index in range(8)]
    for _ in range(30):
        simulation.step()
    assert all(sequence.late for sequence in late)
    on_time = simulation.add([50, 51], 20, arrival=simulation.now, ttft=10.0, tpot=0.009)
    before = simulation.now
    while on_time.finish_reason is None:
        simulation.step()
    # Eight late decodes and one more would take 20 ms a step.
    assert simulation.now - before < 20 * 0.012
    simulation.run()
    assert len(simulation.finished) == 9


def test_a_cached_prefix_counts_for_what_can_still_come_in_time(simulate):
    simulation = simulate(
        policy=DeadlineFirst(), step_seconds=seconds_of, max_length=256, pages=200, step_tokens=64
    )
    for index in range(6):
        simulation.add(range(1000 * index, 1000 * index + 100), 5)
    simulation.run()
    warm = simulation.add(range(100), 2, arrival=simulation.now, ttft=0.06)
    simulation.step()
    assert not warm.late
    simulation.run()
    cold = simulation.add(range(7000, 7100), 2, arrival=simulation.now, ttft=0.06)
    simulation.step()
    assert cold.late
