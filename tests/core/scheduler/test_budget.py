import numpy as np
import pytest

from polysilicon.budget import MIN_CHUNK, StepBudget, StepCost


def truth(prefill, decodes, context):
    return 0.002 + 0.0004 * prefill + 0.0007 * decodes + 2e-7 * context


def observed(seed, steps=300, noise=0.02):
    random = np.random.default_rng(seed)
    cost = StepCost()
    for _ in range(steps):
        prefill, decodes = int(random.choice([0, 0, 64, 512])), int(random.integers(1, 64))
        context = decodes * int(random.integers(1, 2000))
        seconds = truth(prefill, decodes, context) * random.normal(1.0, noise)
        cost.observe(prefill=prefill, decodes=decodes, context=context, seconds=seconds)
    return cost


@pytest.mark.parametrize("seed", range(4))
def test_cost_finds_what_noisy_steps_are_made_of(seed):
    cost = observed(seed)
    for case in [(0, 1, 100), (0, 60, 30_000), (512, 8, 8_000), (100, 0, 0)]:
        prefill, decodes, context = case
        predicted = cost.seconds(prefill=prefill, decodes=decodes, context=context)
        assert predicted == pytest.approx(truth(*case), rel=0.1, abs=0.002)
    assert cost.prefill_seconds(1000) == pytest.approx(0.4, rel=0.1)


def test_cost_follows_a_machine_that_becomes_slower():
    cost = observed(0)
    for _ in range(600):
        cost.observe(prefill=0, decodes=10, context=1000, seconds=0.05)
    assert cost.seconds(prefill=0, decodes=10, context=1000) == pytest.approx(0.05, rel=0.02)


def test_cost_never_predicts_below_zero_and_knows_nothing_at_first():
    cost = StepCost()
    assert not cost.is_known
    assert cost.seconds(prefill=10, decodes=1, context=5) == 0
    assert cost.prefill_within(0.01, decodes=1, context=5) == 2**31 - 1
    for decodes in (1, 2, 4, 8, 16, 32, 64, 8):
        cost.observe(prefill=0, decodes=decodes, context=0, seconds=0.1 / decodes)
    assert cost.is_known
    assert cost.seconds(prefill=0, decodes=200, context=0) >= 0


@pytest.mark.parametrize("seconds", [0.005, 0.02, 0.08, 0.3])
def test_prefill_within_a_time_takes_that_time(seconds):
    cost = observed(7)
    tokens = cost.prefill_within(seconds, decodes=8, context=4000)
    if tokens:
        assert cost.seconds(prefill=tokens, decodes=8, context=4000) <= seconds
    assert cost.seconds(prefill=tokens + 1, decodes=8, context=4000) > seconds


@pytest.mark.parametrize(
    ("decodes", "within", "left"),
    [
        (0, None, 512),
        (12, None, 500),
        (600, None, 1),
        (12, 40, 40),
        (12, 2, MIN_CHUNK),
        (12, 900, 500),
    ],
)
def test_budget_leaves_prefill_what_decodes_and_their_tpot_leave(decodes, within, left):
    budget = StepBudget(512)
    budget.start(decodes, within)
    assert budget.left == left
    budget.ceiling = decodes + 3
    budget.start(decodes, within)
    assert budget.left == min(left, 3)
