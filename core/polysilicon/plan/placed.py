"""What becomes of a model's parameters when they are placed."""

from __future__ import annotations

import dataclasses

from polysilicon.models.config import Latent, ModelConfig
from polysilicon.plan.model import PlannedModel, PlannedTensor
from polysilicon.plan.units import size
from polysilicon.weights.encodings import DENSE_DTYPES

_UP_PROJECTIONS = frozenset({"kv_b", "k_b", "v_b"})


def placed(model: PlannedModel) -> PlannedModel:
    """The model with the matrices that a device holds: those of latent attention are merged, as
    `LatentAttention` says, in 16 bits or as wide as what they come from."""
    latent = model.config.latent
    if latent is None:
        return model
    merged = dataclasses.replace(
        model, tensors=tuple(t for tensor in model.tensors for t in _merged(tensor, model, latent))
    )
    note = (
        f"Latent attention's projections are merged when they are placed, which takes "
        f"{size(merged.nbytes - model.nbytes)} more than what is stored."
    )
    return dataclasses.replace(merged, notes=(*model.notes, note))


def _merged(tensor: PlannedTensor, model: PlannedModel, latent: Latent) -> list[PlannedTensor]:
    """What a parameter's place is taken by."""
    config: ModelConfig = model.config
    prefix, _, module = tensor.key.removesuffix(".weight").rpartition(".")
    if module in _UP_PROJECTIONS:
        return []
    if module == ("q" if latent.query_rank is None else "q_b"):
        return [_dense(tensor, (config.heads * config.head_dim, tensor.shape[1]))]
    if module == "o":
        return [_dense(tensor, (tensor.shape[0], config.heads * latent.rank))]
    if module == "k_rope":
        key = dataclasses.replace(tensor, key=f"{prefix}.latent_key.weight", encoding="dense:bf16")
        return [
            _dense(tensor, (config.head_dim, tensor.shape[1])),
            _dense(key, (config.head_dim, latent.rank)),
        ]
    return [tensor]


def _dense(tensor: PlannedTensor, shape: tuple[int, int]) -> PlannedTensor:
    encoding = tensor.encoding if tensor.encoding == "dense:f32" else "dense:bf16"
    itemsize = DENSE_DTYPES[encoding.removeprefix("dense:")].itemsize
    return dataclasses.replace(
        tensor, shape=shape, nbytes=shape[0] * shape[1] * itemsize, encoding=encoding
    )
