"""Feed-forward blocks: gated ones, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.backend import Handle
from polysilicon.models.architecture import Weights
from polysilicon.models.blocks import Linear, Step, place_linear
from polysilicon.models.config import Experts, ModelConfig
from polysilicon.ops import Routing, Value

Shapes = dict[str, tuple[int, ...]]

_BY_SIGMOID = Routing(top_k=1, scoring="sigmoid", renormalize=False)
"""Routing among one expert: its weight is the sigmoid of its logit."""


class GatedFeedForward:
    """`down (act(gate x) * up x)`. prefix: before its modules' names, as in `layers.3.shared_`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, size: int, biased: bool
    ) -> None:
        self._activation = config.activation
        self._gate_up = place_linear(
            weights,
            [f"{prefix}gate", f"{prefix}up"],
            inputs=config.hidden_size,
            biased=biased,
            target=f"{prefix}gate_up",
        )
        self._down = place_linear(
            weights, [f"{prefix}down"], inputs=size, biased=biased, target=f"{prefix}down"
        )

    def linears(self) -> Sequence[Linear]:
        return (self._gate_up, self._down)

    def __call__(self, step: Step, x: Value) -> Value:
        gate, up = self._gate_up(step, x)
        (x,) = self._down(step, step.ops.gated_act(gate, up, self._activation))
        return x


class Mixture:
    """Experts that a router chooses for each token, and one that every token goes to."""

    def __init__(self, config: ModelConfig, experts: Experts, weights: Weights, index: int) -> None:
        at = f"layers.{index}"
        self._config = config
        self._router = place_linear(
            weights, [f"{at}.router"], inputs=config.hidden_size, biased=experts.router_bias
        )
        self._routing = Routing(
            top_k=experts.top_k,
            scoring=experts.scoring,
            correction=weights.vector(f"{at}.correction.weight") if experts.correction else None,
            groups=experts.groups,
            top_groups=experts.top_groups,
            renormalize=experts.renormalize,
            scale=experts.scale,
        )
        first, last = [f"{at}.expert_gate", f"{at}.expert_up"], f"{at}.expert_down"
        # Biases would have to be placed in the order of their experts, too.
        feeds = None if experts.bias else f"{last}.weight"
        self._gate_up = weights.stack(*(f"{key}.weight" for key in first), feeds=feeds)
        self._down = weights.stack(f"{last}.weight")
        self._gate_up_bias: Handle | None = None
        self._down_bias: Handle | None = None
        if experts.bias:
            self._gate_up_bias = weights.expert_bias(*(f"{key}.bias" for key in first))
            self._down_bias = weights.expert_bias(f"{last}.bias")
        self._shared: GatedFeedForward | _WeightedExpert | None = None
        if experts.shared_size and experts.shared_router:
            self._shared = _WeightedExpert(config, weights, at)
        elif experts.shared_size:
            self._shared = GatedFeedForward(
                config, weights, f"{at}.shared_", experts.shared_size, biased=False
            )

    def linears(self) -> Sequence[Linear]:
        return () if self._shared is None else self._shared.linears()

    def __call__(self, step: Step, x: Value) -> Value:
        (logits,) = self._router(step, x)
        mixed = step.ops.moe(
            x,
            logits,
            self._gate_up,
            self._down,
            routing=self._routing,
            activation=self._config.activation,
            gate_up_bias=self._gate_up_bias,
            down_bias=self._down_bias,
        )
        return mixed if self._shared is None else step.ops.add(mixed, self._shared(step, x))


class _WeightedExpert:
    """A shared expert weighted by the sigmoid of a router of its own (Qwen2-MoE): a mixture of
    one."""

    def __init__(self, config: ModelConfig, weights: Weights, at: str) -> None:
        self._activation = config.activation
        self._router = place_linear(weights, [f"{at}.shared_router"], inputs=config.hidden_size)
        self._gate_up = weights.stack(f"{at}.shared_gate.weight", f"{at}.shared_up.weight")
        self._down = weights.stack(f"{at}.shared_down.weight")

    def linears(self) -> Sequence[Linear]:
        return ()

    def __call__(self, step: Step, x: Value) -> Value:
        (logits,) = self._router(step, x)
        return step.ops.moe(
            x,
            logits,
            self._gate_up,
            self._down,
            routing=_BY_SIGMOID,
            activation=self._activation,
        )


FeedForward = GatedFeedForward | Mixture


def place_feed_forward(config: ModelConfig, weights: Weights, index: int) -> FeedForward:
    """The block of one layer: a mixture where the config says so."""
    if config.experts is not None and config.experts.layers[index]:
        return Mixture(config, config.experts, weights, index)
    return GatedFeedForward(
        config, weights, f"layers.{index}.", config.intermediate_size, config.mlp_bias
    )


def feed_forward_shapes(config: ModelConfig, index: int) -> Shapes:
    """The tensors that the block of one layer is built from, by key."""
    if config.experts is not None and config.experts.layers[index]:
        return _mixture_shapes(config, config.experts, f"layers.{index}.")
    hidden, inner = config.hidden_size, config.intermediate_size
    return _gated_shapes(f"layers.{index}.", hidden, inner, biased=config.mlp_bias)


def _mixture_shapes(config: ModelConfig, experts: Experts, at: str) -> Shapes:
    hidden, count = config.hidden_size, experts.count
    shapes: Shapes = {f"{at}router.weight": (count, hidden)}
    if experts.router_bias:
        shapes[f"{at}router.bias"] = (count,)
    if experts.correction:
        shapes[f"{at}correction.weight"] = (count,)
    one = _gated_shapes(f"{at}expert_", hidden, experts.size, biased=experts.bias)
    shapes |= {key: (count, *shape) for key, shape in one.items()}
    if experts.shared_size:
        shapes |= _gated_shapes(f"{at}shared_", hidden, experts.shared_size, biased=False)
        if experts.shared_router:
            shapes[f"{at}shared_router.weight"] = (1, hidden)
    return shapes


def _gated_shapes(prefix: str, hidden: int, inner: int, *, biased: bool) -> Shapes:
    shapes: Shapes = {
        f"{prefix}gate.weight": (inner, hidden),
        f"{prefix}up.weight": (inner, hidden),
        f"{prefix}down.weight": (hidden, inner),
    }
    if biased:
        shapes |= {
            f"{prefix}gate.bias": (inner,),
            f"{prefix}up.bias": (inner,),
            f"{prefix}down.bias": (hidden,),
        }
    return shapes
