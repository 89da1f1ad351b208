"""What comparisons with engines that read no GGUF import: a file's weights, dequantised to bf16, as
a directory of safetensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import safetensors.numpy

from polysilicon.models.config import ModelConfig
from polysilicon.models.loading import read_config
from polysilicon.weights.gguf import GGUFFile

GEMMA3_LOCAL_ROPE = 1e4


def write(model: Path, folder: Path) -> None:
    """model: a GGUF file of the families llama or gemma3. folder: made where it is missing."""
    with GGUFFile(model) as checkpoint:
        family, config, names = read_config(checkpoint)
        settings = hf_config(config, checkpoint.metadata)
        weights = {
            family.hf_tensors[0].of(key): checkpoint.weight(names.of(key))
            .dequantize()
            .astype(ml_dtypes.bfloat16)
            for key in family.shapes(config)
        }
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
        settings["architectures"] = [family.hf_names[0]]
        (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def hf_config(config: ModelConfig, metadata: Any) -> dict[str, object]:
    """What transformers' config.json says of it."""
    if config.architecture not in ("llama", "gemma3"):
        sys.exit(f"the family {config.architecture} is not one of llama and gemma3")
    architecture = metadata["general.architecture"]
    settings: dict[str, object] = {
        "model_type": "llama" if config.architecture == "llama" else "gemma3_text",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": metadata.get(f"{architecture}.rope.freq_base", 10000.0),
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.o_bias,
    }
    if config.architecture == "llama":
        return settings | {"hidden_act": "silu"}
    return settings | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "rope_local_base_freq": GEMMA3_LOCAL_ROPE,
        "sliding_window": max(window or 0 for window in config.windows),
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ],
    }
