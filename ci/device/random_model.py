"""A model of Llama 3 8B's shape with random weights, made in memory and placed on a device."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from polysilicon.backend import Dense, Device, GroupAffine, GroupFloat, Handle, Weight
from polysilicon.models.config import ModelConfig
from polysilicon.models.decoder import build_decoder, decoder_shapes
from polysilicon.models.llama import LLAMA
from polysilicon.models.model import Model
from polysilicon.weights.fields import Fields

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
TINY = LLAMA_3_8B | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}

Shape = tuple[int, int]
_SAMPLES = 1 << 20


def _normal(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(_SAMPLES, np.float32)


def dense(shape: Shape) -> Weight:
    values = (_normal(1) / np.sqrt(np.float32(shape[1]))).astype(ml_dtypes.bfloat16)
    return Dense(array=np.resize(values, shape))


def fp8(shape: Shape) -> Weight:
    """e4m3 with a scale a row."""
    codes = _normal(2).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    scale = np.full((shape[0], 1), shape[1] ** -0.5, np.float32)
    return GroupFloat(
        shape=shape, format="f8_e4m3", group=shape[1], codes=np.resize(codes, shape), scale=scale
    )


def w4(shape: Shape) -> Weight:
    """Four bits, symmetric, a scale of f16 for every 128 inputs, as GPTQ and AWQ have."""
    rows, columns = shape
    codes = np.random.default_rng(3).integers(0, 256, _SAMPLES, np.uint8)
    scale = np.full((rows, columns // 128), columns**-0.5 / 4.6, np.float16)
    return GroupAffine(
        shape=shape,
        bits=4,
        group=128,
        codes=np.resize(codes, (rows, columns // 2)),
        scale=scale,
        offset=8,
    )


ENCODINGS: dict[str, Callable[[Shape], Weight]] = {"bf16": dense, "fp8": fp8, "w4": w4}


class RandomWeights:
    """Places weights of the layers in one encoding, embedding and head in bf16; the same numbers in
    every layer, for it takes long to draw 8 billion. nbytes: what a step reads of them."""

    def __init__(self, device: Device, config: ModelConfig, encoding: str) -> None:
        self.nbytes = 0
        self._device = device
        self._shapes = decoder_shapes(config)
        self._encode = ENCODINGS[encoding]
        self._made: dict[tuple[Shape, bool], Weight] = {}

    def matrix(self, *keys: str) -> Handle:
        return self._put([self._matrix(key) for key in keys], keys)

    def vector(self, *keys: str, offset: float = 0.0) -> Handle:
        ones = [np.full(self._shapes[key], 1.0 + offset, np.float32) for key in keys]
        return self._put([Dense(array=array) for array in ones], keys)

    def _matrix(self, key: str) -> Weight:
        rows, columns = self._shapes[key]
        of_layer = key.startswith("layers.")
        made = (rows, columns), of_layer
        if made not in self._made:
            self._made[made] = (self._encode if of_layer else dense)((rows, columns))
        return self._made[made]

    def _put(self, parts: list[Weight], keys: tuple[str, ...]) -> Handle:
        handle = self._device.put(parts)
        if keys != ("embedding.weight",):
            self.nbytes += handle.nbytes
        return handle


def build(device: Device, encoding: str, *, tiny: bool) -> tuple[Model, int]:
    """The model, and the bytes of weights that a step reads."""
    config = LLAMA.read_hf(Fields(TINY if tiny else LLAMA_3_8B, "Llama 3 8B"), None)
    weights = RandomWeights(device, config, encoding)
    model = build_decoder(config, weights)
    model.nbytes = weights.nbytes
    return model, weights.nbytes
