"""The device: options, memory that does not grow, compiled forwards."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

mx = pytest.importorskip(
    "mlx.core", reason="mlx is not installed: pip install 'polysilicon[metal]'"
)

from polysilicon.backend import (  # noqa: E402
    DeviceError,
    DeviceLost,
    KVSpec,
    ModelOutputs,
    OutOfMemory,
    Unavailable,
    kv_planes,
)
from polysilicon.testing import encoded  # noqa: E402
from polysilicon.testing.attention import AttentionBench, AttentionCase, Extension  # noqa: E402
from polysilicon.testing.batches import Chunk, make_batch  # noqa: E402
from polysilicon.testing.kit import Kit, as_forward, assert_close  # noqa: E402
from polysilicon.testing.sampling import drawing, sampling  # noqa: E402
from polysilicon_metal import hardware  # noqa: E402
from polysilicon_metal.plugin import MetalBackend  # noqa: E402


def open_kit(**options):
    return Kit(MetalBackend().open(0, options), np.random.default_rng())


@pytest.fixture
def kit():
    kit = open_kit()
    yield kit
    kit.device.close()


def test_what_mlx_does_at_most():
    device = MetalBackend().open(0, {})
    found = device.ceilings((1 << 20) + 3)
    assert set(found) == {"bandwidth", "f32", "f16", "bf16"}
    assert all(np.isfinite(rate) and rate > 1e5 for rate in found.values())
    with pytest.raises(OutOfMemory, match="working set"):
        device.ceilings(1 << 50)
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.ceilings(1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "fp4"}, "one of auto, f32, f16, bf16, got 'fp4'"),
        ({"compile": "yes"}, "compile is 0 or 1, got 'yes'"),
        ({"deterministic": "1"}, "choose a backend that declares it"),
        ({"threads": "2"}, "unknown option 'threads'"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MetalBackend().open(0, options)


def test_the_plugin_loads_no_mlx():
    code = (
        "import sys, polysilicon_metal.plugin as plugin\n"
        "assert not any(name.split('.')[0] == 'mlx' for name in sys.modules)\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "print(plugin.MetalBackend().probe().reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "mlx is not installed: pip install 'polysilicon[metal]'"


def test_an_mlx_that_cannot_be_loaded_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "polysilicon_metal.hardware", None)
    found = MetalBackend().probe()
    assert isinstance(found, Unavailable)
    assert re.fullmatch(r"mlx cannot be loaded \(.+\): pip install .+", found.reason)


def test_an_old_mlx_is_named(monkeypatch):
    monkeypatch.setattr(hardware, "version", lambda name: "0.31.2")
    found = MetalBackend().probe()
    assert isinstance(found, Unavailable)
    assert found.reason == "mlx 0.31.2 is too old: pip install -U 'polysilicon[metal]'"


def test_a_cpu_stands_in_for_a_gpu():
    [info] = MetalBackend().probe()
    assert info.stand_in == (not mx.metal.is_available())


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize(("kv_dtype", "compiled"), [("bf16", "0"), ("int8", "0"), ("f16", "1")])
def test_kv_stays_in_place(kv_dtype, compiled, run_ahead):
    """Steps, copies, reads and writes of a pool take a fraction of it, however many there are."""
    if compiled == "1" and shutil.which("g++") is None:
        pytest.skip("MLX compiles for a CPU with g++")
    kit = open_kit(compile=compiled)
    spec = KVSpec(
        group=0, name="large", layers=(0, 1), window=None, page_size=16,
        planes=kv_planes(heads=2, key_dim=64, value_dim=64, dtype=kv_dtype),
    )  # fmt: skip
    pool = kit.device.kv_pool(spec, 2000)
    table, _ = kit.dense(kit.normal(50, 128))

    def forward(ops, batch):
        x = ops.embed(table, batch.tokens)
        for layer in spec.layers:
            x = ops.attention(x, x, x, batch=batch, pool=pool, layer=layer, heads=2, scale=0.1)
        return ModelOutputs(logits=x, hidden=())

    program = kit.device.compile(forward)
    data = np.zeros((1, 1, spec.block_bytes), np.uint8)
    pool.read([3], data).result()
    into = data.copy()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    previous = None
    for step in range(12):
        chunk = Chunk(tokens=[7], start=step, pages=([3],), sources=None if step == 0 else [0])
        outputs = program(make_batch([chunk], (16,)), previous)
        earlier, previous = previous, kit.device.sample(outputs, sampling(1))
        pending = earlier if run_ahead else previous
        if pending is not None:
            pending.result()
        if step % 4 == 1:
            slots = np.arange(48, 56, dtype=np.int32)
            pool.copy(slots, slots + 16)
            pool.read([3], into)
        if step % 4 == 2:
            pool.write([5], data)
    previous.result()
    assert mx.get_peak_memory() - before < pool.nbytes / 4
    kit.device.close()


def test_results_from_another_thread(kit):
    """MLX's own streams belong to the thread that made them; the device's does not."""
    bench = AttentionBench(kit, AttentionCase(dim=32))
    context = bench.context(30)
    failures = []

    def step():
        try:
            bench.step([Extension(context=context, tokens=bench.random_tokens(5))])
        except BaseException as error:
            failures.append(error)

    for _ in range(3):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        step()
    assert not failures


def test_a_failed_evaluation_loses_the_device(kit, monkeypatch):
    table, _ = kit.dense(kit.normal(4, 8))
    program = kit.device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))
    batch = kit.rows([1])
    good = program(batch, None)
    good.result()

    def fail(*arrays):
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    with monkeypatch.context() as context:
        context.setattr(mx, "async_eval", fail)
        bad = program(batch, None)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="Insufficient Memory"):
            bad.result()
    with pytest.raises(DeviceLost, match="Insufficient Memory"):
        program(batch, None)


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles for a CPU with g++")
def test_compiled_forwards():
    """What a GPU gets by default, in several buckets of tokens and contexts."""
    kit = open_kit(compile="1")
    assert kit.capabilities.capture
    bench = AttentionBench(kit, AttentionCase(heads=2, key_heads=1, dim=32), pages=9)
    program = kit.device.compile(as_forward(bench.forward))
    contexts = [bench.context(40) for _ in range(2)]
    for counts in ((17, 1), (1, 1), (1, 1), (2, 1)):
        extensions = [Extension(context=context, tokens=bench.random_tokens(count))
                      for context, count in zip(contexts, counts, strict=True)]  # fmt: skip
        outputs = program(bench.batch(extensions), None)
        tokens = kit.device.sample(outputs, drawing(kit, sum(counts)))
        expected = np.concatenate([bench.extend(extension) for extension in extensions])
        assert_close(outputs.result().logits, expected, bench.bound)
        assert tokens.result().tokens.shape == (sum(counts),)
    kit.device.close()


@pytest.mark.parametrize("kind", ["dense:f32", "dense:bf16", "affine:4/32", "affine:6/16"])
@pytest.mark.parametrize("activations", ["bf16", "f16"])
def test_rounded_activations(activations, kind):
    """Products stay within the declared precision's bound, and are not exact: they are rounded."""
    kit = open_kit(activations=activations)
    assert kit.capabilities.compute == activations
    weight = encoded.of_kind(kind)(kit.rng, (40, 256))
    handle = kit.put(weight.weight)
    table = encoded.dense(kit.rng, (9, 256))
    x = kit.device.put([table.weight])
    [actual] = kit.evaluate(
        lambda ops, batch: ops.linear(ops.embed(x, batch.tokens), handle)[0], kit.rows(range(9))
    )
    expected = table.values @ weight.values.T
    assert_close(actual, expected, kit.bound)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(actual, expected, 2e-5)
    kit.device.close()
