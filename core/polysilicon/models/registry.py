"""The model families that are known, and which one a checkpoint is of."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.errors import ModelError
from polysilicon.models import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo,
    phi,
    qwen,
    qwen_moe,
    stablelm,
)
from polysilicon.models.architecture import Architecture
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import shown
from polysilicon.weights.gguf import GGUFFile


def architectures(added: Sequence[Architecture] = ()) -> tuple[Architecture, ...]:
    """All families: `added` ones (of plugins) first, so that they may replace one of ours."""
    return (
        *added,
        *llama.ARCHITECTURES,
        *mistral.ARCHITECTURES,
        *qwen.ARCHITECTURES,
        *gemma.ARCHITECTURES,
        *phi.ARCHITECTURES,
        *mixtral.ARCHITECTURES,
        *qwen_moe.ARCHITECTURES,
        *gpt_oss.ARCHITECTURES,
        *olmo.ARCHITECTURES,
        *granite.ARCHITECTURES,
        *glm.ARCHITECTURES,
        *stablelm.ARCHITECTURES,
        *deepseek.ARCHITECTURES,
    )


def find_hf(fields: Fields, families: Sequence[Architecture]) -> Architecture:
    """The family of a config.json: by `architectures`, or by `model_type` where that is missing."""
    names = fields.strings("architectures")
    if names:
        found = [family for family in families if names[0] in family.hf_names]
        name = names[0]
    else:
        name = fields.text("model_type")
        found = [family for family in families if name in family.hf_types]
    if found:
        return found[0]
    raise _unknown(fields, name, [name for family in families for name in family.hf_names])


def find_gguf(fields: Fields, families: Sequence[Architecture]) -> Architecture:
    """The family of GGUF metadata: by `general.architecture`."""
    name = fields.text("general.architecture")
    for family in families:
        if name in family.gguf_names:
            return family
    raise _unknown(fields, name, [name for family in families for name in family.gguf_names])


def is_defined(checkpoint: Checkpoint, added: Sequence[Architecture] = ()) -> bool:
    """Whether one of the families, or of plugins' `added`, is that of a checkpoint. True too where
    the checkpoint does not say its architecture in a way that can be read: loading it says why."""
    try:
        if isinstance(checkpoint, GGUFFile):
            name = Fields(checkpoint.metadata, "").text("general.architecture")
            return any(name in family.gguf_names for family in architectures(added))
    except ModelError:
        pass
    return True


def _unknown(fields: Fields, name: str, known: list[str]) -> ModelError:
    return ModelError(
        f"{fields.source} is of architecture {shown(name)}, which is not known. Known are "
        f"{', '.join(sorted(known))}. Choose a model of one of these, or install a plugin for it."
    )
