"""What a step reads of a model's weights, and what it multiplies with them."""

from __future__ import annotations

import dataclasses

from polysilicon.plan.model import PlannedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTraffic:
    """Bytes and parameters that a step touches.

    read: bytes that every step reads: all but experts, and but the rows of an embedding table that
    is not the output projection too. expert_read: bytes of all experts. expert_share: the part of
    them that one token goes to. layer_products, head_products: parameters that each token, and each
    row of logits, is multiplied with.
    """

    read: int
    expert_read: int
    expert_share: float
    layer_products: float
    head_products: int

    def bytes_of(self, tokens: int) -> float:
        """Bytes that a step of `tokens` tokens reads. Of a mixture's experts it is those that some
        token goes to, where each goes to its own by chance."""
        missed: float = (1.0 - self.expert_share) ** tokens
        return self.read + self.expert_read * (1.0 - missed)


def weight_traffic(model: PlannedModel) -> WeightTraffic:
    config = model.config
    read = expert_read = head_products = 0
    layer_products = 0.0
    share = 1.0 if config.experts is None else config.experts.top_k / config.experts.count
    for tensor in model.tensors:
        if tensor.is_stack:
            expert_read += tensor.nbytes
            layer_products += tensor.parameters * share
            continue
        is_table = tensor.key == "embedding.weight"
        if is_table and not config.tied_head:
            continue
        read += tensor.nbytes
        if is_table or tensor.key == "head.weight":
            head_products += tensor.parameters
        elif tensor.is_matrix:
            layer_products += tensor.parameters
    return WeightTraffic(
        read=read,
        expert_read=expert_read,
        expert_share=share,
        layer_products=layer_products,
        head_products=head_products,
    )
