"""Plans: the field's worked numbers, and counting one by one what the formulas count at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import KV_DTYPES
from polysilicon.errors import ConfigError
from polysilicon.models.config import kv_groups
from polysilicon.plan.bill import kv_bytes, prompt_logits_bytes, workspace_bytes
from polysilicon.plan.hardware import Figure, Hardware, KnownHardware, find_hardware, hardware_table
from polysilicon.plan.kv import plan_pages
from polysilicon.plan.model import PlannedModel, open_model, quantized
from polysilicon.plan.placed import placed
from polysilicon.plan.planner import Load, Plan, Speed, bill_of, load_for, plan
from polysilicon.plan.speed import Part, Work, cost_per_million, end_to_end
from polysilicon.plan.weights import weight_traffic

WriteConfig = Callable[..., Path]
WINDOWED = ("mistral-7b", "gemma-2-2b", "gemma-3-1b", "gpt-oss-20b")
PLAIN = {"page_size": 16, "step_tokens": 512, "adapters": 0, "adapter_rank": 16}


def loaded(model: PlannedModel, **given: Any) -> Load:
    wanted: dict[str, Any] = {
        "context": None, "concurrency": 1, "input_tokens": None, "output_tokens": None,
        "kv_dtype": "f16", **PLAIN,
    }  # fmt: skip
    return load_for(model, **(wanted | given))


def made(
    *, memory: float = 1e9, bandwidth: float = 1e9, rates: Mapping[str, float] | None = None
) -> KnownHardware:
    return KnownHardware(
        key="made",
        name="made",
        memory=Figure(value=memory, source="here"),
        read=Figure(value=bandwidth, source="here"),
        rates={dtype: Figure(value=rate, source="here") for dtype, rate in (rates or {}).items()},
    )


def test_kv_of_llama_2_7b(write_config: WriteConfig) -> None:
    """512 KiB a token in 16 bits, 2 GiB at 4,096."""
    model = open_model(str(write_config("llama-2-7b")))
    (spec,) = kv_groups(model.config, 16, "f16")
    assert spec.token_bytes == 512 << 10
    bill = bill_of(model, loaded(model, context=4096))
    assert bill.kv == {"full": (2 << 30) + spec.page_bytes}


def test_kv_of_llama_3_70b(write_config: WriteConfig) -> None:
    """320 KiB a token in 16 bits, 1.25 GiB at 4,096."""
    model = open_model(str(write_config("llama-3-70b")))
    (spec,) = kv_groups(model.config, 16, "bf16")
    assert spec.token_bytes == 320 << 10
    bill = bill_of(model, loaded(model, context=4096))
    assert bill.kv["full"] - spec.page_bytes == 1.25 * 2**30


def test_kv_of_latent_attention(write_config: WriteConfig) -> None:
    """One key of 576 and one value of 512 for all heads of each of 27 layers."""
    model = open_model(str(write_config("deepseek-v2-lite")))
    (spec,) = kv_groups(model.config, 16, "bf16")
    assert spec.token_bytes == 27 * 2 * (576 + 512)


def test_a_stream_on_an_a100(write_config: WriteConfig) -> None:
    """14 GB at 2 TB/s are about 140 tokens a second, and four times as many in a quarter of the
    bytes; Llama-2-7B's 13.2 GB that a step reads are a little more."""
    assert find_hardware("a100").bandwidth(0).value == 2.039e12
    step = Part(nbytes=14e9, operations=0).seconds(bandwidth=2e12, rate=None)
    quarter = Part(nbytes=14e9 / 4, operations=0).seconds(bandwidth=2e12, rate=None)
    assert step is not None
    assert quarter is not None
    assert 1 / step == pytest.approx(140, rel=0.03)
    assert step / quarter == pytest.approx(4)
    model = open_model(str(write_config("llama-2-7b")))
    speed = Speed(model, find_hardware("a100"), loaded(model))
    rate = speed.decode_rate(concurrency=1, context=1024)
    assert rate == pytest.approx(140, rel=0.07)


def test_four_bits_are_as_fast_as_they_are_small(write_config: WriteConfig) -> None:
    model = open_model(str(write_config("llama-2-7b")))
    rates = {}
    for scheme in ("none", "w4"):
        variant = quantized(model, scheme)
        found = plan(variant, scheme, find_hardware("a100"), loaded(variant, context=2))
        rates[scheme] = found.stream_rate
    whole, four = weight_traffic(model).read, weight_traffic(quantized(model, "w4")).read
    # A scale and a bias for 32 make 5 bits of 4, and the head has 8.
    assert 3.1 < whole / four < 3.2
    assert rates["w4"] / rates["none"] == pytest.approx(whole / four, rel=1e-3)


def test_the_end_to_end_time() -> None:
    """512 tokens at 20 ms after 250 ms: 10.5 s."""
    assert end_to_end(ttft=0.25, tpot=0.02, output_tokens=512) == pytest.approx(10.5, rel=0.005)
    assert end_to_end(ttft=0.25, tpot=0.02, output_tokens=1) == 0.25


def test_costs() -> None:
    assert cost_per_million(price=3.6, tokens_per_s=1000) == pytest.approx(1.0)


def visible(position: int, window: int | None) -> int:
    return position if window is None else min(position, window)


@pytest.mark.parametrize(
    "name",
    [
        "llama-2-7b",
        "mistral-7b",
        "gemma-2-2b",
        "gemma-3-1b",
        "mixtral-8x7b",
        "gpt-oss-20b",
        "deepseek-v2-lite",
    ],
)
def test_operations_counted_one_by_one(name: str, write_config: WriteConfig) -> None:
    """Small prompts: every token by every matrix, every query by every key that it sees."""
    rng = np.random.default_rng()
    window = int(rng.integers(1, 40))
    changes = {"sliding_window": window} if name in WINDOWED else {}
    model = placed(open_model(str(write_config(name, **changes))))
    config = model.config
    tokens = int(rng.integers(1, 90))
    speed = Speed(model, made(bandwidth=1e30, rates={"bf16": 1.0}), loaded(model))
    share = 1.0 if config.experts is None else config.experts.top_k / config.experts.count
    dense = sum(
        tensor.parameters * (share if tensor.is_stack else 1)
        for tensor in model.tensors
        if tensor.is_matrix and tensor.key.startswith("layers.")
    )
    head = config.vocab_size * config.hidden_size
    each = 2 * config.heads * (config.head_dim + (config.value_dim or config.head_dim))
    pairs = sum(
        visible(position, limit) for limit in config.windows for position in range(1, tokens + 1)
    )
    expected = 2 * (tokens * dense + head) + each * pairs
    assert speed.prefill_seconds(tokens) == pytest.approx(expected, rel=1e-12)
    seen = sum(visible(tokens, limit) for limit in config.windows)
    step = speed.decode_step(concurrency=3, context=tokens)
    assert step.operations == pytest.approx(3 * (2 * (dense + head) + each * seen), rel=1e-12)


def test_parts_follow_one_another() -> None:
    """Each is bound by its bytes or by its products, and their times add up."""
    work = Work(
        parts=(Part(nbytes=10, operations=1), Part(nbytes=1, operations=40)), working_set=11
    )
    assert (work.nbytes, work.operations) == (11, 41)
    assert work.seconds(bandwidth=2, rate=5) == 10 / 2 + 40 / 5
    assert work.seconds(bandwidth=2, rate=None) == 11 / 2
    assert work.seconds(bandwidth=None, rate=5) == 41 / 5
    assert work.seconds(bandwidth=None, rate=None) is None


def test_prefill_reads_the_layers_once_a_step(write_config: WriteConfig) -> None:
    """And the head once, whose logits of the last token are written and read."""
    model = open_model(str(write_config("qwen2.5-0.5b")))
    load = loaded(model, step_tokens=100)
    speed = Speed(model, made(bandwidth=1.0, rates={"bf16": 1e30}), load)
    traffic = weight_traffic(model)
    head = traffic.head_read + 2 * 151936 * 4
    steps = {1: 1, 99: 1, 100: 1, 101: 2, 1000: 10}
    assert {n: speed.prefill_seconds(n) for n in steps} == {
        n: count * traffic.layer_read + head for n, count in steps.items()
    }


def test_caches_hold_what_one_step_reads(write_config: WriteConfig) -> None:
    """The bandwidth is that of the working set, not of all the bytes of a long prompt."""
    asked: list[int] = []

    class Asked(KnownHardware):
        def bandwidth(self, nbytes: int) -> Figure:
            asked.append(nbytes)
            return self.read

    model = open_model(str(write_config("qwen2.5-0.5b")))
    known = made(rates={"bf16": 1e30})
    hardware = Asked(**{f.name: getattr(known, f.name) for f in dataclasses.fields(known)})
    speed = Speed(model, hardware, loaded(model, step_tokens=100))
    speed.prefill_seconds(1000)
    speed.decode_seconds(concurrency=3, context=64)
    kv = 3 * 64 * kv_groups(model.config, 16, "f16")[0].token_bytes
    logits = 2 * 3 * 151936 * 4
    assert asked == [model.nbytes, model.nbytes + kv + logits]


def test_what_a_step_reads(write_config: WriteConfig) -> None:
    tied = open_model(str(write_config("qwen2.5-0.5b")))
    assert weight_traffic(tied).read == tied.nbytes
    untied = open_model(str(write_config("llama-2-7b")))
    assert weight_traffic(untied).read == untied.nbytes - 2 * 32000 * 4096


def test_experts_that_are_read(write_config: WriteConfig) -> None:
    """By drawing experts for tokens: 2 of 8 for each."""
    model = open_model(str(write_config("mixtral-8x7b")))
    traffic = weight_traffic(model)
    assert traffic.read + traffic.expert_read + 2 * 32000 * 4096 == model.nbytes
    assert traffic.bytes_of(1) == pytest.approx(traffic.read + traffic.expert_read / 4)
    assert traffic.bytes_of(1 << 20) == pytest.approx(traffic.read + traffic.expert_read)
    rng = np.random.default_rng(7)
    drawn = rng.random((4000, 5, 8)).argsort(axis=-1)[..., :2].reshape(4000, 10)
    touched = (drawn[..., None] == np.arange(8)).any(axis=1).sum(axis=-1)
    expected = (traffic.bytes_of(5) - traffic.read) / traffic.expert_read
    assert np.mean(touched) / 8 == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["mistral-7b", "gemma-3-1b", "gpt-oss-20b", "llama-2-7b"])
def test_the_engine_would_plan_as_many_pages(
    name: str, dtype: str, write_config: WriteConfig
) -> None:
    """A budget of exactly the bill holds the load, and one page less does not."""
    rng = np.random.default_rng()
    config = open_model(str(write_config(name))).config
    specs = kv_groups(config, int(rng.choice([1, 16, 64])), dtype)
    concurrency, step_tokens = int(rng.integers(1, 50)), int(rng.integers(1, 600))
    context = int(rng.integers(2, 5000))
    bill = kv_bytes(specs, concurrency=concurrency, context=context, step_tokens=step_tokens)
    pages = plan_pages(
        specs, budget=sum(bill.values()), max_sequences=concurrency, max_length=context,
        step_tokens=step_tokens,
    )  # fmt: skip
    assert {
        spec.name: count * spec.page_bytes for spec, count in zip(specs, pages, strict=True)
    } == bill


def test_windows_bound_kv(write_config: WriteConfig) -> None:
    model = open_model(str(write_config("gemma-3-1b")))
    short, long = (bill_of(model, loaded(model, context=n)).kv for n in (8192, 32768))
    assert long["sliding-512"] == short["sliding-512"]
    assert long["full"] > 3.9 * short["full"]
    token = {spec.name: spec.token_bytes for spec in kv_groups(model.config, 16, "f16")}
    # 26 layers, every sixth of which sees all: 4 and 22, of one head of 256, k and v of two bytes.
    assert token == {"full": 4 * 1024, "sliding-512": 22 * 1024}
    assert long["sliding-512"] == token["sliding-512"] * (16 + 512 + 512 + 16)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "gemma-3-1b"])
def test_what_fits_is_the_most_that_does(name: str, write_config: WriteConfig) -> None:
    rng = np.random.default_rng()
    model = open_model(str(write_config(name, max_position_embeddings=700, num_hidden_layers=6)))
    smallest = bill_of(model, loaded(model, context=2)).total
    load = loaded(model, context=int(rng.integers(2, 700)), concurrency=int(rng.integers(1, 40)))
    for _ in range(20):
        hardware = made(memory=smallest * float(rng.uniform(0.99, 1.2)))
        found = plan(model, "none", hardware, load)

        def holds(hardware: Hardware = hardware, **change: int) -> bool:
            changed = dataclasses.replace(load, **change)  # type: ignore[arg-type]
            return bill_of(model, changed).total <= hardware.memory.value

        most = found.most_context
        assert most == 0 or holds(context=most)
        assert most == 700 or not holds(context=most + 1)
        most = found.most_sequences
        assert most == 0 or holds(concurrency=most)
        assert not holds(concurrency=most + 1)
        assert found.fits == holds()
    assert plan(model, "none", made(memory=1e6), load).most_context == 0
    assert plan(model, "none", made(memory=1e15), load).most_context == 700
    assert plan(model, "none", made(memory=1e15), load).most_sequences == 1 << 16


def figures(found: Plan) -> list[float | None]:
    return [found.stream_rate, found.batch_rate, found.prefill_rate, found.ttft, found.tpot,
            found.end_to_end, found.input_cost, found.output_cost]  # fmt: skip


def test_a_whole_plan(write_config: WriteConfig) -> None:
    model = open_model(str(write_config("llama-2-7b")))
    load = loaded(model, context=4096, concurrency=8, input_tokens=1000, output_tokens=512)
    found = plan(model, "none", find_hardware("a100"), load, price=1.8)
    assert None not in figures(found)
    assert found.fits
    assert found.bill.total == found.bill.weights + 8 * (2 << 30) + (512 << 14) + (
        found.bill.workspace
    )
    read, logits = weight_traffic(model).read, 2 * 32000 * 4
    assert found.stream_rate == pytest.approx(2.039e12 / (read + (2 << 30) + logits))
    assert found.batch_rate == pytest.approx(8 * 2.039e12 / (read + (16 << 30) + 8 * logits))
    assert found.tpot == pytest.approx((read + 8 * (1256 << 19) + 8 * logits) / 2.039e12)
    assert found.ttft == pytest.approx(2 * 1000 * 6.5e9 / 312e12, rel=0.05)
    assert found.prefill_rate == pytest.approx(1000 / found.ttft)
    assert found.end_to_end == pytest.approx(found.ttft + 511 * found.tpot)
    assert found.input_cost == pytest.approx(1.8 / 3600 * found.ttft * 1000)
    assert found.output_cost == pytest.approx(1.8 / 3600 * found.tpot / 8 * 1e6)


def test_many_streams_are_bound_by_products(write_config: WriteConfig) -> None:
    model = open_model(str(write_config("llama-2-7b")))
    load = loaded(model, context=2, concurrency=4096)
    found = plan(model, "none", find_hardware("l40s"), load)
    # Beside the products of the matrices there are two tokens' KV and a float32 for each of the
    # vocabulary to read for each stream.
    each = 2 * 6.607e9 / 362.05e12 + (2 * (512 << 10) + 32000 * 4) / 864e9
    assert found.batch_rate == pytest.approx(1 / each, rel=1e-3)


def test_each_part_is_bound_by_what_it_needs_most(write_config: WriteConfig) -> None:
    """At 64 streams the matrices are bound by products, KV by bandwidth, and a mixture's experts,
    which each see few of the tokens, by bandwidth too."""
    model = open_model(str(write_config("mixtral-8x7b")))
    hardware = made(bandwidth=1e12, rates={"bf16": 50e12})
    speed = Speed(model, hardware, loaded(model))
    traffic = weight_traffic(model)
    kv = 1000 * kv_groups(model.config, 16, "f16")[0].token_bytes
    products = 2 * 64 * (traffic.layer_products + traffic.head_products) / 50e12
    moved = (traffic.expert_bytes(64) + 64 * kv + 64 * 32000 * 4) / 1e12
    assert 2 * 64 * traffic.expert_products / 50e12 < traffic.expert_bytes(64) / 1e12
    seconds = speed.decode_seconds(concurrency=64, context=1000)
    assert seconds == pytest.approx(products + moved)


def test_rates_that_no_vendor_prints(write_config: WriteConfig) -> None:
    """Apple's: decode from the bandwidth alone, and no word on prefill."""
    model = open_model(str(write_config("llama-2-7b")))
    found = plan(model, "none", find_hardware("m4-max"), loaded(model), price=1.0)
    assert found.products is None
    assert (found.ttft, found.prefill_rate, found.end_to_end, found.input_cost) == (None,) * 4
    assert found.stream_rate is not None
    assert found.output_cost is not None


@pytest.mark.parametrize(
    ("settings", "hardware", "dtype"),
    [
        ({"quant_method": "fp8"}, "h100", "fp8"),
        ({"quant_method": "fp8"}, "a100", "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "b200", "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "h100", "bf16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "h100", "bf16"),
        (None, "h100", "bf16"),
    ],
)
def test_what_products_are_computed_in(
    settings: object, hardware: str, dtype: str, write_config: WriteConfig
) -> None:
    model = open_model(str(write_config("llama-2-7b", quantization_config=settings)))
    found = plan(model, "none", find_hardware(hardware), loaded(model))
    assert found.products == (dtype, hardware_table()[hardware].rates[dtype])


def test_adapters(write_config: WriteConfig) -> None:
    """A and B of every projection: rank times inputs and outputs, in float32."""
    model = open_model(str(write_config("llama-2-7b")))
    load = loaded(model, adapters=3, adapter_rank=8)
    sides = 4 * (4096 + 4096) + 3 * (4096 + 11008)
    assert bill_of(model, load).adapters == 3 * 8 * 32 * sides * 4


def test_the_workspace_grows_with_steps_and_sequences(write_config: WriteConfig) -> None:
    config = open_model(str(write_config("llama-2-7b"))).config
    sizes = {
        (step, sequences): workspace_bytes(config, step_tokens=step, max_sequences=sequences)
        for step in (128, 512)
        for sequences in (8, 64, 1 << 16)
    }
    assert sizes[128, 8] < sizes[128, 64] < sizes[512, 64] < sizes[512, 1 << 16]
    # Outputs eight times, and three copies in the sampler.
    assert sizes[512, 64] - sizes[512, 8] == 56 * 32000 * 4 * (8 + 3)
    longest = prompt_logits_bytes(config, step_tokens=512)
    assert longest == (3 * 512 + 3 * 64) * 32000 * 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4096, 3584, 512)),
        ({"context": 2}, (2, 1, 1)),
        ({"context": 101}, (101, 51, 50)),
        ({"context": 1000, "input_tokens": 900}, (1000, 900, 100)),
        ({"context": 1000, "output_tokens": 7}, (1000, 993, 7)),
        ({"input_tokens": 10, "output_tokens": 20}, (4096, 10, 20)),
    ],
)
def test_what_is_left_open(
    given: dict[str, int], expected: tuple[int, int, int], write_config: WriteConfig
) -> None:
    load = loaded(open_model(str(write_config("llama-2-7b"))), **given)
    assert (load.context, load.input_tokens, load.output_tokens) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": 4097}, "--context 4,097 is not between 2 and the 4,096 tokens"),
        ({"context": 1}, "--context 1 "),
        ({"context": -5}, "--context -5 "),
        ({"concurrency": 0}, "--concurrency 0 is not between 1 and 65,536"),
        ({"concurrency": 1 << 17}, "--concurrency 131,072 "),
        ({"kv_dtype": "f8"}, "--kv-dtype 'f8' is not one of f32, f16"),
        ({"input_tokens": 4096}, "--input-tokens"),
        ({"input_tokens": 0}, "--input-tokens"),
        ({"output_tokens": 5000}, "--output-tokens 5,000 is not between"),
        ({"input_tokens": 4000, "output_tokens": 97}, "4,000 tokens and 97 more"),
        ({"output_tokens": -1}, "--output-tokens"),
    ],
)
def test_loads_that_cannot_be(
    given: dict[str, Any], message: str, write_config: WriteConfig
) -> None:
    model = open_model(str(write_config("llama-2-7b")))
    with pytest.raises(ConfigError, match=message):
        loaded(model, **given)
