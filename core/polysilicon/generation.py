"""What a model's own files say of how it wants to be sampled."""

from __future__ import annotations

from polysilicon.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from polysilicon.weights.safetensors import SafetensorsDirectory


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float | int]:
    """Fields of SamplingParams that the model's generation configuration sets."""
    defaults: dict[str, float | int] = {}
    if isinstance(checkpoint, SafetensorsCheckpoint | SafetensorsDirectory):
        said = checkpoint.generation_config
        if said.get("do_sample"):
            defaults["temperature"] = 1.0
            for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
                if isinstance(said.get(name), int | float):
                    defaults[name] = said[name]
        if isinstance(said.get("repetition_penalty"), int | float):
            defaults["repetition_penalty"] = said["repetition_penalty"]
    return defaults


def command_line_defaults(checkpoint: Checkpoint) -> dict[str, float | int]:
    """The same for commands, which are greedy where the model says nothing."""
    return {"temperature": 0.0} | sampling_defaults(checkpoint)
