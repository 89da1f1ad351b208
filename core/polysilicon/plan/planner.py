"""A plan: one model, in one quantisation, on one accelerator, for one load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from polysilicon.backend import KV_DTYPES, KVSpec
from polysilicon.errors import ConfigError
from polysilicon.models.config import kv_groups
from polysilicon.plan.bill import (
    Bill,
    adapter_bytes,
    kv_bytes,
    prompt_logits_bytes,
    workspace_bytes,
)
from polysilicon.plan.hardware import Figure, Hardware
from polysilicon.plan.model import PlannedModel
from polysilicon.plan.speed import (
    Work,
    cost_per_million,
    decode_work,
    end_to_end,
    prefill_work,
)
from polysilicon.plan.weights import weight_traffic

MOST_SEQUENCES = 1 << 16
"""The most that `--max-sequences` takes."""

_OUTPUT_TOKENS = 512
_CONTEXT = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the model.

    context: tokens of the longest sequence, for which memory is set aside. concurrency: sequences
    at once. input_tokens, output_tokens: of a request. kv_dtype, page_size, step_tokens: as the
    engine's flags of these names. adapters, adapter_rank: LoRA adapters that are held.
    """

    context: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    kv_dtype: str
    page_size: int
    step_tokens: int
    adapters: int = 0
    adapter_rank: int = 16

    @property
    def mean_context(self) -> int:
        """Tokens of a running sequence halfway through its output."""
        return self.input_tokens + (self.output_tokens + 1) // 2


def load_for(
    model: PlannedModel,
    *,
    context: int | None,
    concurrency: int,
    input_tokens: int | None,
    output_tokens: int | None,
    kv_dtype: str,
    page_size: int,
    step_tokens: int,
    adapters: int,
    adapter_rank: int,
) -> Load:
    """A load with what was left open: a context of 8,192 tokens, or as many as the model has, and
    requests that fill it, of which up to 512 tokens, at most half, are output.

    Raises ConfigError for what cannot be.
    """
    longest = model.config.max_length
    if context is None:
        context = min(_CONTEXT, longest)
    if not 2 <= context <= longest:
        raise ConfigError(
            f"--context {context:,} is not between 2 and the {longest:,} tokens of {model.name}"
        )
    if not 1 <= concurrency <= MOST_SEQUENCES:
        raise ConfigError(f"--concurrency {concurrency:,} is not between 1 and {MOST_SEQUENCES:,}")
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype!r:.80} is not one of {', '.join(KV_DTYPES)}")
    for option, given in (("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        if given is not None and not 1 <= given < context:
            raise ConfigError(
                f"{option} {given:,} is not between 1 and {context - 1:,}, as a token of "
                f"--context {context:,} is left for the other"
            )
    if output_tokens is None:
        output_tokens = (
            context - input_tokens if input_tokens else min(_OUTPUT_TOKENS, context // 2)
        )
    if input_tokens is None:
        input_tokens = context - output_tokens
    if input_tokens + output_tokens > context:
        raise ConfigError(
            f"requests of {input_tokens:,} tokens and {output_tokens:,} more do not fit into "
            f"--context {context:,}: lower --input-tokens and --output-tokens, or raise it"
        )
    return Load(
        context=context,
        concurrency=concurrency,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        kv_dtype=kv_dtype,
        page_size=page_size,
        step_tokens=step_tokens,
        adapters=adapters,
        adapter_rank=adapter_rank,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What comes of it. Times are seconds and rates tokens a second, at best; None: not known.

    bill: for the load's concurrency and context. most_context: tokens that each of as many
    sequences can have, most_sequences: sequences that can have this context, 0 for none.
    stream_rate, batch_rate: decode of one sequence and of all together, at the full context.
    prefill_rate: of one prompt. ttft: of a prompt that nothing else is computed beside. tpot: of
    all sequences halfway through their outputs. end_to_end: of both. products: dtype that products
    are computed in, and its rate. bandwidth: at what a step of the whole batch moves.
    price: dollars an hour. input_cost, output_cost: dollars for a million tokens of prompts, and of
    outputs.
    """

    model: PlannedModel
    quantization: str
    hardware: Hardware
    load: Load
    bill: Bill
    most_context: int
    most_sequences: int
    stream_rate: float | None
    batch_rate: float | None
    prefill_rate: float | None
    ttft: float | None
    tpot: float | None
    end_to_end: float | None
    products: tuple[str, Figure] | None
    bandwidth: Figure | None
    price: float | None
    input_cost: float | None
    output_cost: float | None

    @property
    def fits(self) -> bool:
        return self.bill.total <= self.hardware.memory.value

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        return specs_of(self.model, self.load)


def specs_of(model: PlannedModel, load: Load) -> tuple[KVSpec, ...]:
    return kv_groups(model.config, load.page_size, load.kv_dtype)


def bill_of(model: PlannedModel, load: Load) -> Bill:
    """What the load takes, item by item."""
    linears = [
        tensor.shape
        for tensor in model.tensors
        if tensor.is_matrix and not tensor.is_stack and tensor.key.startswith("layers.")
    ]
    return Bill(
        weights=model.nbytes,
        kv=kv_bytes(
            specs_of(model, load),
            concurrency=load.concurrency,
            context=load.context,
            step_tokens=load.step_tokens,
        ),
        adapters=adapter_bytes(
            ((outputs, inputs) for outputs, inputs in linears),
            adapters=load.adapters,
            rank=load.adapter_rank,
        ),
        workspace=workspace_bytes(
            model.config, step_tokens=load.step_tokens, max_sequences=load.concurrency
        ),
        prompt_logits=prompt_logits_bytes(model.config, step_tokens=load.step_tokens),
    )


def product_dtype(model: PlannedModel) -> str:
    """fp8 or fp4 where most of the layers' parameters are stored so. What is multiplied in 8 bits
    of other weights is up to a backend's rounding of activations: 16 bits are counted."""
    layers = [t for t in model.tensors if t.is_matrix and t.key.startswith("layers.")]
    whole = sum(tensor.parameters for tensor in layers)
    for prefix, dtype in (("float:f8", "fp8"), ("float:f4", "fp4")):
        stored = sum(t.parameters for t in layers if t.encoding.startswith(prefix))
        if 2 * stored > whole:
            return dtype
    return "bf16"


class Speed:
    """How fast a model can be on an accelerator, whatever the load's numbers.

    kv_dtype, page_size and step_tokens are those of `load`.
    """

    def __init__(self, model: PlannedModel, hardware: Hardware, load: Load) -> None:
        self.products = hardware.product_rate(product_dtype(model))
        self._hardware = hardware
        self._config = model.config
        self._traffic = weight_traffic(model)
        self._specs = specs_of(model, load)
        self._step_tokens = load.step_tokens

    def decode_step(self, *, concurrency: int, context: int) -> Work:
        return decode_work(
            self._traffic, self._config, self._specs, concurrency=concurrency, context=context
        )

    def decode_seconds(self, *, concurrency: int, context: int) -> float | None:
        """The least that a step takes in which so many sequences of `context` tokens get one more;
        by bandwidth alone where no rate of products is known."""
        work = self.decode_step(concurrency=concurrency, context=context)
        return self._seconds(work)

    def decode_rate(self, *, concurrency: int, context: int) -> float | None:
        """Tokens a second of all sequences together, at most."""
        seconds = self.decode_seconds(concurrency=concurrency, context=context)
        return concurrency / seconds if seconds else None

    def prefill_seconds(self, tokens: int) -> float | None:
        """The least that a prompt takes; None where no rate of products is known."""
        if self.products is None:
            return None
        return self._seconds(
            prefill_work(
                self._traffic,
                self._config,
                self._specs,
                tokens=tokens,
                step_tokens=self._step_tokens,
            )
        )

    def _seconds(self, work: Work) -> float | None:
        bandwidth = self._hardware.bandwidth(int(work.working_set))
        return work.seconds(
            bandwidth=None if bandwidth is None else bandwidth.value,
            rate=None if self.products is None else self.products[1].value,
        )


def most_context(model: PlannedModel, hardware: Hardware, load: Load) -> int:
    """Tokens that each of the load's sequences can have, 0 for none."""
    return _most(
        lambda context: _fits(model, hardware, dataclasses.replace(load, context=context)),
        model.config.max_length,
    )


def most_sequences(model: PlannedModel, hardware: Hardware, load: Load) -> int:
    """Sequences of the load's context that fit, 0 for none."""
    return _most(
        lambda count: _fits(model, hardware, dataclasses.replace(load, concurrency=count)),
        MOST_SEQUENCES,
    )


def _fits(model: PlannedModel, hardware: Hardware, load: Load) -> bool:
    return bill_of(model, load).total <= hardware.memory.value


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, 0 for none. fits: true up to some number."""
    low, high = 0, limit
    while low < high:
        middle = -(-(low + high) // 2)
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def plan(
    model: PlannedModel,
    quantization: str,
    hardware: Hardware,
    load: Load,
    *,
    price: float | None = None,
) -> Plan:
    """The plan for a model that is `quantized` already. price: dollars an hour."""
    speed = Speed(model, hardware, load)

    def cost(tokens_per_s: float | None) -> float | None:
        if price is None or tokens_per_s is None:
            return None
        return cost_per_million(price=price, tokens_per_s=tokens_per_s)

    ttft = speed.prefill_seconds(load.input_tokens)
    tpot = speed.decode_seconds(concurrency=load.concurrency, context=load.mean_context)
    prefill_rate = load.input_tokens / ttft if ttft else None
    whole = None
    if ttft is not None and tpot is not None:
        whole = end_to_end(ttft=ttft, tpot=tpot, output_tokens=load.output_tokens)
    step = speed.decode_step(concurrency=load.concurrency, context=load.context)
    return Plan(
        model=model,
        quantization=quantization,
        hardware=hardware,
        load=load,
        bill=bill_of(model, load),
        most_context=most_context(model, hardware, load),
        most_sequences=most_sequences(model, hardware, load),
        stream_rate=speed.decode_rate(concurrency=1, context=load.context),
        batch_rate=speed.decode_rate(concurrency=load.concurrency, context=load.context),
        prefill_rate=prefill_rate,
        ttft=ttft,
        tpot=tpot,
        end_to_end=whole,
        products=speed.products,
        bandwidth=hardware.bandwidth(int(step.working_set)),
        price=price,
        input_cost=cost(prefill_rate),
        output_cost=cost(load.concurrency / tpot if tpot else None),
    )
