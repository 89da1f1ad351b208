"""The torch device on the host: which kernels ran, one engine on interpreted Triton, its errors."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from polysilicon.backend import Dense, DeviceError, DeviceLost, OutOfMemory
from polysilicon.request import Request
from polysilicon.testing.engine_bench import EngineBench, greedy, random_prompt
from polysilicon.testing.kit import Kit, as_forward
from polysilicon.testing.sampling import sampling
from polysilicon.testing.tiny_models import tiny_gemma, tiny_llama
from polysilicon_cuda.host import TARGETS as CUDA_TARGETS
from polysilicon_cuda.host import polysilicon_backends as cuda_host
from polysilicon_rocm.host import TARGETS as ROCM_TARGETS
from polysilicon_rocm.host import polysilicon_backends as rocm_host
from polysilicon_torch import ceilings
from polysilicon_torch.device import TorchDevice
from polysilicon_torch.errors import contract_errors
from polysilicon_torch.options import Options

HOSTS = {"cuda": cuda_host, "rocm": rocm_host}


def open_host(vendor: str, **options: str) -> TorchDevice:
    [backend] = HOSTS[vendor]()
    device = backend.open(0, options)
    assert isinstance(device, TorchDevice)
    return device


@pytest.fixture
def device() -> Iterator[TorchDevice]:
    device = open_host("cuda", kernels="torch", activations="f32")
    yield device
    device.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each Triton kernel was launched, by name."""
    launches: Counter[str] = Counter()
    launch = GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        launches[self.fn.__name__] += 1
        return launch(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return launches


@pytest.mark.parametrize(
    ("vendor", "target", "model", "activations"),
    [("cuda", "sm_90", tiny_llama, "f32"), ("rocm", "gfx942", tiny_gemma, "f16")],
)
def test_engine_on_triton_kernels(
    launched: Counter[str], tmp_path: Path, vendor: str, target: str, model: Any, activations: str
) -> None:
    """Every token is right, and it was our kernels that computed all but dense products."""
    device = open_host(vendor, kernels="triton", activations=activations, target=target)
    bench = EngineBench(device, model(), tmp_path)
    rng = np.random.default_rng()
    requests = [
        Request(id="long", prompt=random_prompt(rng, 21), params=greedy(5)),
        Request(
            id="drawn",
            prompt=random_prompt(rng, 3),
            params=greedy(5, temperature=0.7, seed=3, top_k=40),
        ),
    ]
    bench.serve(requests)
    assert bench.positions == 10
    names = {
        "embed_kernel", "norm_kernel", "gated_act_kernel", "prepare_kernel", "attend_kernel",
        "gather_tokens_kernel",
    }  # fmt: skip
    assert names <= set(launched)
    layers = 2 if model is tiny_llama else 3
    steps = launched["embed_kernel"]
    assert launched["gated_act_kernel"] == layers * steps
    assert launched["prepare_kernel"] == layers * steps
    assert launched["attend_kernel"] >= layers * steps
    device.close()


def test_torch_kernels_launch_no_triton(launched: Counter[str], device: TorchDevice) -> None:
    kit = Kit(device, np.random.default_rng())
    table, _ = kit.dense(kit.normal(8, 8))
    program = device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))
    device.sample(program(kit.rows([1, 2]), None), sampling(2)).result()
    assert not launched


@pytest.mark.parametrize("vendor", HOSTS)
def test_options(vendor: str) -> None:
    targets = CUDA_TARGETS if vendor == "cuda" else ROCM_TARGETS
    for options, words in (
        ({"target": "sm_1"}, targets[0]),
        ({"kernels": "fast"}, "kernels is torch"),
        ({"activations": "int8"}, "activations is one of auto, bf16, f16, f32"),
        ({"graphs": "yes"}, "graphs is 0 or 1"),
        ({"deterministic": "1"}, "not deterministic"),
        ({"speed": "high"}, "unknown option 'speed'"),
    ):
        with pytest.raises(ValueError, match=words):
            open_host(vendor, **options)
    [backend] = HOSTS[vendor]()
    with pytest.raises(ValueError, match="device 0 only"):
        backend.open(1, {})
    assert Options.parse(vendor, {}) == Options(activations=torch.bfloat16, graphs=True)


def test_errors_of_torch_become_the_contracts() -> None:
    """What it raises for a card that is full or lost; anything else is a defect and stays."""
    cases = [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), DeviceLost),
        (RuntimeError("HIP error: the operation cannot be performed\nmore"), DeviceLost),
    ]
    for error, expected in cases:
        with pytest.raises(expected, match="a step: ") as caught, contract_errors("a step"):
            raise error
        assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="shapes"), contract_errors("a step"):
        raise RuntimeError("shapes do not match")


def test_what_the_hardware_does_at_most(device: TorchDevice) -> None:
    found = device.ceilings((1 << 20) + 3)
    assert set(found) == {"bandwidth", "f32", "f16", "bf16"}
    assert all(np.isfinite(rate) and rate > 1e6 for rate in found.values())
    with pytest.raises(OutOfMemory, match="working set"):
        device.ceilings(1 << 50)
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.ceilings(1 << 20)


@pytest.mark.parametrize("refused", [False, True])
def test_eight_bit_products_that_torch_may_not_have(
    refused: bool, device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = []

    def scaled_product(a: torch.Tensor, b: torch.Tensor, *scales: Any, out_dtype: torch.dtype):
        if refused:
            raise RuntimeError("only with compute capability >= 8.9")
        multiplied.append((a.dtype, b.dtype))
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    found = ceilings.ceilings(device.runtime, 1 << 16, "ocp")
    assert ("fp8" in found) == (not refused)
    assert set(multiplied) == (set() if refused else {(torch.float8_e4m3fn,) * 2})


def test_memory_is_itemised(device: TorchDevice) -> None:
    before = device.memory()
    assert set(before.used) == {"weights", "kv", "adapters", "graphs", "workspace"}
    handle = device.put([Dense(array=np.zeros((64, 64), np.float32))] * 2)
    assert handle.nbytes == 2 * 64 * 64 * 4
    assert device.memory().used["weights"] == handle.nbytes
    del handle
    assert not device.memory().used["weights"]


def test_things_of_another_device_are_refused(device: TorchDevice) -> None:
    other = open_host("rocm", kernels="torch", activations="f32")
    kits = [Kit(each, np.random.default_rng()) for each in (device, other)]
    programs = []
    for kit in kits:
        table, _ = kit.dense(kit.normal(8, 8))
        programs.append(
            kit.device.compile(
                as_forward(lambda ops, batch, table=table: ops.embed(table, batch.tokens))
            )
        )
    foreign = programs[1](kits[1].rows([1]), None)
    with pytest.raises(ValueError, match="same device"):
        device.sample(foreign, sampling(1))
    tokens = other.sample(foreign, sampling(1))
    batch = kits[0].rows([1])
    batch.token_source[0] = 0
    with pytest.raises(ValueError, match="previous"):
        programs[0](batch, tokens)
    with pytest.raises(ValueError, match="there is none"):
        programs[0](batch, None)
    own = device.sample(programs[0](kits[0].rows([1]), None), sampling(1))
    batch.token_source[0] = 1
    with pytest.raises(DeviceError, match="token_source"):
        programs[0](batch, own)
    with pytest.raises(ValueError, match="2 rows"):
        device.sample(programs[0](kits[0].rows([1, 2]), None), sampling(1))
    other.close()
    with pytest.raises(DeviceError, match="closed"):
        tokens.result()
    with contextlib.suppress(DeviceError):
        other.close()
