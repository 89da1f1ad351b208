"""What a step reads of a model's weights, and what it multiplies with them."""

from __future__ import annotations

import dataclasses

from polysilicon.plan.model import PlannedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTraffic:
    """Bytes and parameters that a step touches.

    layer_read, head_read: bytes that every step reads of what is not an expert, the output
    projection apart: all but the rows of an embedding table that is not the projection too.
    expert_read: bytes of all experts. expert_share: the part of them that one token goes to.
    layer_products, expert_products, head_products: parameters that each token, and each row of
    logits, is multiplied with.
    """

    layer_read: int
    head_read: int
    expert_read: int
    expert_share: float
    layer_products: int
    expert_products: float
    head_products: int

    @property
    def read(self) -> int:
        return self.layer_read + self.head_read

    def expert_bytes(self, tokens: int) -> float:
        """Bytes of a mixture's experts that some of `tokens` tokens goes to, where each goes to its
        own by chance."""
        missed: float = (1.0 - self.expert_share) ** tokens
        return self.expert_read * (1.0 - missed)

    def bytes_of(self, tokens: int) -> float:
        """Bytes that a step of `tokens` tokens reads."""
        return self.read + self.expert_bytes(tokens)


def weight_traffic(model: PlannedModel) -> WeightTraffic:
    config = model.config
    layer_read = head_read = expert_read = layer_products = expert_parameters = head_products = 0
    share = 1.0 if config.experts is None else config.experts.top_k / config.experts.count
    for tensor in model.tensors:
        if tensor.is_stack:
            expert_read += tensor.nbytes
            expert_parameters += tensor.parameters
            continue
        is_table = tensor.key == "embedding.weight"
        if is_table and not config.tied_head:
            continue
        if is_table or tensor.key == "head.weight":
            head_read += tensor.nbytes
            head_products += tensor.parameters
            continue
        layer_read += tensor.nbytes
        if tensor.is_matrix:
            layer_products += tensor.parameters
    return WeightTraffic(
        layer_read=layer_read,
        head_read=head_read,
        expert_read=expert_read,
        expert_share=share,
        layer_products=layer_products,
        expert_products=expert_parameters * share,
        head_products=head_products,
    )
