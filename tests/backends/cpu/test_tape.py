"""Recording forwards and replaying them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from polysilicon.backend import Dense, DeviceError, ModelOutputs
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import as_forward
from polysilicon.testing.sampling import sampling
from polysilicon_cpu.plugin import CPUBackend


def put(device, array):
    return device.put([Dense(array=np.asarray(array, np.float32))])


def rows(tokens):
    return make_batch([Chunk(tokens=list(tokens))])


@pytest.fixture
def table(device, rng):
    values = rng.standard_normal((40, 24)).astype(np.float32)
    return put(device, values), values


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize(
    "use", [bool, len, iter, int, float, lambda x: x + 1, lambda x: 2 * x, lambda x: x[0],
            lambda x: x < x, lambda x: -x, lambda x: x.shape, np.asarray],
)  # fmt: skip
@pytest.mark.parametrize("of_batch", [True, False])
def test_symbols_are_opaque(device, table, use, of_batch):
    def forward(ops, batch):
        use(batch.tokens if of_batch else ops.embed(table[0], batch.tokens))

    with pytest.raises(TypeError, match="traced"):
        device.compile(forward)


def test_ops_outside_a_forward_are_refused(device, table):
    kept = []

    def forward(ops, batch):
        kept.append((ops, batch))
        return ModelOutputs(
            logits=ops.select(ops.embed(table[0], batch.tokens), batch.logit_rows), hidden=()
        )

    device.compile(forward)
    ops, batch = kept[0]
    with pytest.raises(ValueError, match="compile"):
        ops.embed(table[0], batch.tokens)
    with pytest.raises(ValueError, match="compile"):
        device.ops.embed(table[0], batch.tokens)


def test_values_of_another_forward_are_refused(device, table):
    kept = []

    def first(ops, batch):
        kept.append(ops.embed(table[0], batch.tokens))
        return ModelOutputs(logits=ops.select(kept[0], batch.logit_rows), hidden=())

    device.compile(first)
    with pytest.raises(ValueError, match="no value of this forward"):
        device.compile(as_forward(lambda ops, batch: ops.scale(kept[0], 2.0)))


def test_widths_that_do_not_fit_are_refused(device, table, rng):
    matrix = put(device, rng.standard_normal((8, 25)))
    vector = put(device, np.ones(25))
    wrong = [
        lambda ops, x: ops.linear(x, matrix),
        lambda ops, x: ops.rms_norm(x, vector, eps=1e-5),
        lambda ops, x: ops.rms_norm(x, matrix, eps=1e-5),
        lambda ops, x: ops.linear(x, vector),
        lambda ops, x: ops.gated_act(x, x, "swish"),
        lambda ops, x: ops.moe(x, x, matrix, matrix, routing=None, activation="silu"),
    ]
    for use in wrong:
        with pytest.raises(ValueError, match=r"\w"):
            device.compile(
                as_forward(lambda ops, batch, use=use: use(ops, ops.embed(table[0], batch.tokens)))
            )


def test_memory_is_used_again_along_the_tape(device, table):
    """Sixty ops in a row keep no more than a few of their results at a time."""

    def computation(ops, batch):
        x = ops.embed(table[0], batch.tokens)
        for _ in range(60):
            x = ops.scale(x, -1.0)
        return x

    program = device.compile(as_forward(computation))
    tokens = np.arange(33) % 40
    assert np.array_equal(program(rows(tokens), None).result().logits, table[1][tokens])
    assert 0 < program.nbytes <= 4 * 33 * 24 * 4


def test_values_that_are_read_late_are_kept(device, table):
    """A value that the last op reads is not overwritten by those between."""

    def computation(ops, batch):
        first = ops.embed(table[0], batch.tokens)
        x = first
        for _ in range(7):
            x = ops.scale(x, 2.0)
        return ops.add(first, x)

    program = device.compile(as_forward(computation))
    result = program(rows(range(5)), None).result().logits
    np.testing.assert_allclose(result, table[1][:5] * 129, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 4, 5, 40])
@pytest.mark.parametrize("used", ["once", "by two", "as an output", "gate too", "swapped"])
def test_a_gated_activation_and_the_product_before_it(capsys, rng, count, used):
    """A product whose two parts a gated activation alone reads computes that."""
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((80, 24), (24, 40))]
    values = rng.standard_normal((40, 24)).astype(np.float32)
    device = CPUBackend().open(0, {"activations": "f32", "threads": "2", "profile": "1"})
    table, both = put(device, values), device.put([Dense(array=w) for w in np.split(weights[0], 2)])
    down = put(device, weights[1])

    def forward(ops, batch):
        x = ops.embed(table, batch.tokens)
        gate, up = ops.linear(x, both)
        gated = ops.gated_act(*((up, gate) if used == "swapped" else (gate, up)), "silu")
        (y,) = ops.linear(gated, down)
        if used in ("by two", "gate too"):
            y = ops.add(y, *ops.linear(gate if used == "gate too" else gated, down))
        hidden = [gated] if used == "as an output" else []
        return ModelOutputs(logits=ops.select(ops.add(x, y), batch.logit_rows), hidden=hidden)

    tokens = np.arange(count) % 40
    hidden = (0,) if used == "as an output" else ()
    program = device.compile(forward, hidden=hidden)
    outputs = program(rows(tokens), None).result()
    x = values[tokens].astype(np.float64)
    gate, up = np.split(x @ weights[0].T, 2, axis=1)
    if used == "swapped":
        gate, up = up, gate
    gated = gate / (1 + np.exp(-gate)) * up
    if hidden:
        np.testing.assert_allclose(outputs.hidden[0], gated, rtol=1e-4, atol=1e-4)
    read = {"by two": 2 * gated, "gate too": gated + gate}.get(used, gated)
    expected = x + read @ weights[1].T
    np.testing.assert_allclose(
        outputs.logits, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )
    device.close()
    ops = {line.split()[0] for line in capsys.readouterr().err.splitlines()}
    assert ("gated_act" in ops, "gated" in ops) == (
        (True, False) if used in ("gate too", "swapped") else (False, True)
    )


@pytest.mark.parametrize("count", [1, 4, 5, 40])
@pytest.mark.parametrize("used", ["once", "by two", "as an output", "sums too", "apart"])
def test_norms_and_the_product_behind_them(capsys, rng, count, used):
    """A product that alone reads a norm computes it, with the sum that it makes of the residual
    stream, and with the norm of what is added."""
    weight = rng.standard_normal((24, 24)).astype(np.float32)
    values = rng.standard_normal((40, 24)).astype(np.float32)
    scales = rng.standard_normal((2, 24)).astype(np.float32)
    device = CPUBackend().open(0, {"activations": "f32", "threads": "2", "profile": "1"})
    table, matrix = put(device, values), put(device, weight)
    first, second = (put(device, row) for row in scales)

    def forward(ops, batch):
        residual = ops.embed(table, batch.tokens)
        x = residual
        sums, normed = [], []
        for _ in range(3):
            x, _ = ops.rms_norm(ops.scale(x, 1.5), first, eps=1e-5)
            if used == "apart":
                x = ops.add(x, x)
            x, residual = ops.rms_norm(x, second, eps=1e-3, residual=residual)
            sums.append(residual)
            normed.append(x)
            (y,) = ops.linear(x, matrix)
            x = ops.add(y, x) if used == "by two" else y
        hidden = {"as an output": normed, "sums too": sums}.get(used, [])
        total = ops.add(x, residual)
        return ModelOutputs(logits=ops.select(total, batch.logit_rows), hidden=hidden)

    def norm(x, weight, eps):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight

    hidden = (0, 1, 2) if used in ("as an output", "sums too") else ()
    program = device.compile(forward, hidden=hidden)
    tokens = np.arange(count) % 40
    outputs = program(rows(tokens), None).result()
    residual = values[tokens].astype(np.float64)
    x = residual
    for layer in range(3):
        x = norm(1.5 * x, scales[0], 1e-5)
        residual = residual + (2 * x if used == "apart" else x)
        normed = norm(residual, scales[1], 1e-3)
        if hidden:
            expected = residual if used == "sums too" else normed
            np.testing.assert_allclose(outputs.hidden[layer], expected, rtol=1e-3, atol=1e-3)
        x = normed @ weight.T + (normed if used == "by two" else 0)
    expected = x + residual
    np.testing.assert_allclose(
        outputs.logits, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
    )
    device.close()
    ops = {line.split()[0] for line in capsys.readouterr().err.splitlines()}
    assert "normed" in ops or used in ("by two", "as an output")
    assert ("rms_norm" in ops) == (used in ("by two", "as an output", "apart"))


def test_one_value_as_several_outputs(device, table):
    def forward(ops, batch):
        x = ops.embed(table[0], batch.tokens)
        return ModelOutputs(logits=ops.select(x, batch.logit_rows), hidden=[x, x])

    outputs = device.compile(forward, hidden=(1, 0))(rows([3, 1]), None).result()
    for result in (outputs.logits, *outputs.hidden.values()):
        assert np.array_equal(result, table[1][[3, 1]])


def test_a_part_of_a_product_as_output(device, table, rng):
    weights = [rng.standard_normal((n, 24)).astype(np.float32) for n in (6, 9)]
    handle = device.put([Dense(array=weight) for weight in weights])

    def forward(ops, batch):
        x = ops.select(ops.embed(table[0], batch.tokens), batch.logit_rows)
        return ModelOutputs(logits=ops.linear(x, handle)[1], hidden=())

    result = device.compile(forward)(rows(range(7)), None).result().logits
    expected = table[1][:7] @ weights[1].T
    assert np.abs(result - expected).max() <= 0.02 * np.abs(expected).max()


def test_a_failed_step_fails_what_depends_on_it_and_nothing_else(device, table):
    program = device.compile(as_forward(lambda ops, batch: ops.embed(table[0], batch.tokens)))
    failed = program(rows([40]), None)
    sampled = device.sample(failed, sampling(1))
    following = program(make_batch([Chunk(tokens=[0], sources=[0])]), sampled)
    other = program(rows([7]), None)
    for _ in range(2):
        for pending in (following, sampled, failed):
            with pytest.raises(DeviceError, match="token 40"):
                pending.result()
    assert np.array_equal(other.result().logits, table[1][[7]])


def test_rows_of_no_step_before_are_refused(device, table):
    program = device.compile(as_forward(lambda ops, batch: ops.embed(table[0], batch.tokens)))
    with pytest.raises(DeviceError, match="token_source"):
        program(make_batch([Chunk(tokens=[0], sources=[0])]), None).result()
    sampled = device.sample(program(rows([1]), None), sampling(1))
    with pytest.raises(DeviceError, match="token_source"):
        program(make_batch([Chunk(tokens=[0], sources=[1])]), sampled).result()


def test_steps_do_not_hold_on_to_those_before(device, table):
    """Each step names the tokens of the one before; a chain of all would fill the memory."""
    program = device.compile(as_forward(lambda ops, batch: ops.embed(table[0], batch.tokens)))
    step = program(rows([1, 2]), None)
    first = weakref.ref(step)
    sizes = []
    for _ in range(50):
        sampled = device.sample(step, sampling(2))
        step = program(make_batch([Chunk(tokens=[0], sources=[0]), Chunk(tokens=[5])]), sampled)
        sampled.result()
        sizes.append(device.memory().used["workspace"])
    step.result()
    gc.collect()
    assert first() is None
    assert sizes[-1] == sizes[10]


def test_threads_change_nothing(rng):
    values = rng.standard_normal((64, 96)).astype(np.float32)
    weight = rng.standard_normal((200, 96)).astype(np.float32)
    results = []
    for threads in (1, 2, 5):
        device = CPUBackend().open(0, {"threads": str(threads), "deterministic": "1"})
        table, matrix = put(device, values), put(device, weight)
        norm = put(device, np.ones(200))

        def computation(ops, batch, table=table, matrix=matrix, norm=norm):
            (x,) = ops.linear(ops.embed(table, batch.tokens), matrix)
            return ops.rms_norm(x, norm, eps=1e-5)[0]

        program = device.compile(as_forward(computation))
        results.append(program(rows(range(64)), None).result().logits)
        device.close()
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_closing_drops_what_has_not_begun(table, device):
    program = device.compile(as_forward(lambda ops, batch: ops.embed(table[0], batch.tokens)))
    pending = [program(rows(range(40)), None) for _ in range(200)]
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        pending[-1].result()
    with pytest.raises(DeviceError, match="closed"):
        device.memory()


def test_the_profile_names_the_ops(capsys, rng):
    device = CPUBackend().open(0, {"profile": "1"})
    table = put(device, rng.standard_normal((4, 8)))
    program = device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))
    program(rows([1]), None).result()
    device.close()
    assert "embed" in capsys.readouterr().err
