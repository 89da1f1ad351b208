"""Parameters and tensors that cannot be: one error naming the field, before anything loads."""

from __future__ import annotations

import contextlib
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polysilicon.backend import Device
from polysilicon.errors import ConfigError, ModelError
from polysilicon.models.loading import load_model, read_config
from polysilicon.models.registry import architectures, find_hf
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.fields import Fields

from .conftest import Array, Tiny, TinyModel, WriteGGUF, WriteSafetensors

HUGE = 1 << 62


@pytest.mark.parametrize("value", [0, -1, HUGE, 10**400, 1.5, "32", True, [32], {}, math.nan])
@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_sizes(field: str, value: object, tiny: Tiny, write_safetensors: WriteSafetensors) -> None:
    model = tiny("llama")
    with (
        open_checkpoint(write_safetensors({**model.config, field: value}, model.weights)) as opened,
        pytest.raises(ModelError, match=field) as raised,
    ):
        read_config(opened)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("llama", {"num_attention_heads": 5, "head_dim": None}, "num_attention_heads"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"head_dim": 7}, "head_dim"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ("llama", {"hidden_act": "softmax"}, "hidden_act"),
        ("llama", {"hidden_act": "x" * 10000}, "hidden_act"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ("llama", {"attention_bias": 1}, "attention_bias"),
        ("llama", {"mlp_bias": []}, "mlp_bias"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures"),
        ("llama", {"architectures": [], "model_type": 3}, "model_type"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"sliding_window": -8}, "sliding_window"),
        ("qwen2-sliding", {"use_sliding_window": "yes"}, "use_sliding_window"),
        ("qwen2-sliding", {"layer_types": None, "max_window_layers": -1}, "max_window_layers"),
        ("qwen2-sliding", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2-sliding", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("qwen2-sliding", {"layer_types": [["full_attention"]] * 3}, "layer_types"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma2", {"attn_logit_softcapping": -5.0}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": math.nan}, "final_logit_softcapping"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_local_base_freq": "10000"}, "rope_local_base_freq"),
        ("gemma3", {"text_config": [1]}, "text_config"),
        ("phi3", {"sliding_window": 0}, "sliding_window"),
        ("phi3-longrope", {"original_max_position_embeddings": -1}, "original_max_position"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("mixtral", {"num_local_experts": HUGE}, "num_local_experts"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("qwen2moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("qwen2moe", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("qwen2moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("qwen2moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen2moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen2moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen3moe", {"use_sliding_window": 1}, "use_sliding_window"),
        ("qwen2moe-sliding", {"max_window_layers": -1}, "max_window_layers"),
        ("qwen2moe-sliding", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("qwen3moe", {"num_local_experts": None, "num_experts": 1.5}, "num_experts"),
        ("qwen3moe", {"moe_intermediate_size": "16"}, "moe_intermediate_size"),
        ("gpt-oss", {"swiglu_limit": 8.0}, "swiglu_limit"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("olmo2", {"attention_bias": None, "rms_norm_eps": -1}, "rms_norm_eps"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("granite", {"residual_multiplier": math.inf}, "residual_multiplier"),
        ("granite", {"attention_multiplier": -0.5}, "attention_multiplier"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor"),
        ("stablelm", {"layer_norm_eps": 2.0}, "layer_norm_eps"),
        ("stablelm", {"qk_layernorm": "yes"}, "qk_layernorm"),
        ("stablelm", {"use_parallel_residual": 1}, "use_parallel_residual"),
        ("deepseek2", {"attention_bias": True}, "attention_bias"),
        ("deepseek2", {"topk_method": "random"}, "topk_method"),
        ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek2", {"kv_lora_rank": 16 * 5 + 1}, "kv_lora_rank"),
        ("deepseek2", {"q_lora_rank": 0}, "q_lora_rank"),
        ("deepseek2", {"qk_rope_head_dim": 3}, "rotates 3"),
        ("deepseek3", {"n_group": 3}, "n_group"),
        ("deepseek3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek3", {"topk_group": 3}, "topk_group"),
        ("deepseek3", {"num_experts_per_tok": 3}, "topk_group"),
        ("deepseek3", {"n_shared_experts": -1}, "n_shared_experts"),
        ("deepseek3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("deepseek3", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
    ],
)
def test_other_fields(
    name: str, changes: dict[str, Any], field: str, tiny: Tiny, write_safetensors: WriteSafetensors
) -> None:
    model = tiny(name)
    with (
        open_checkpoint(write_safetensors({**model.config, **changes}, model.weights)) as opened,
        pytest.raises(ModelError, match=field) as raised,
    ):
        read_config(opened)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_missing_fields(field: str, tiny: Tiny, write_safetensors: WriteSafetensors) -> None:
    model = tiny("llama")
    config = {key: value for key, value in model.config.items() if key != field}
    with (
        open_checkpoint(write_safetensors(config, model.weights)) as opened,
        pytest.raises(ModelError, match=f"lacks {field}"),
    ):
        read_config(opened)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"embedding_length": 0}, "llama.embedding_length"),
        ({"block_count": HUGE}, "llama.block_count"),
        ({"attention.head_count": 5}, "llama.attention.head_count"),
        ({"attention.head_count": [4, 4, 2]}, "llama.attention.head_count"),
        ({"attention.head_count_kv": 3}, "llama.attention.head_count_kv"),
        ({"attention.value_length": 4}, "llama.attention.value_length"),
        ({"attention.key_length": 7}, "llama.attention.key_length"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "llama.attention.layer_norm_rms_epsilon"),
        ({"context_length": 0}, "llama.context_length"),
        ({"expert_count": -1}, "llama.expert_count"),
        ({"expert_count": 8}, "llama.expert_used_count"),
        ({"expert_count": 8, "expert_used_count": 9}, "llama.expert_used_count"),
        ({"expert_count": HUGE, "expert_used_count": 2}, "llama.expert_count"),
        ({"rope.freq_base": 0.0}, "llama.rope.freq_base"),
        ({"rope.freq_base": "10000"}, "llama.rope.freq_base"),
        ({"rope.dimension_count": 3}, "llama.rope.dimension_count"),
        ({"rope.dimension_count": 10}, "llama.rope.dimension_count"),
        ({"rope.scaling.type": "spiral"}, "llama.rope.scaling.type"),
        ({"rope.scaling.factor": -4.0}, "llama.rope.scaling.factor"),
        ({"rope.scaling.factor": 1e-5}, "llama.rope.scaling.factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"attention.sliding_window": -1}, "llama.attention.sliding_window"),
    ],
)
def test_gguf_metadata(
    changes: dict[str, Any], key: str, tiny: Tiny, write_gguf: WriteGGUF
) -> None:
    with (
        open_checkpoint(write_gguf(tiny("llama"), changes)) as opened,
        pytest.raises(ModelError, match=key),
    ):
        read_config(opened)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(3, np.float32), "has shape"),
        (np.zeros(4, np.float32), "not positive"),
        (np.full(4, np.nan, np.float32), "not positive"),
    ],
)
def test_gguf_rope_factors(factors: Array, message: str, tiny: Tiny, write_gguf: WriteGGUF) -> None:
    with (
        open_checkpoint(
            write_gguf(tiny("llama"), tensors={"rope_freqs.weight": factors})
        ) as opened,
        pytest.raises(ModelError, match=message),
    ):
        read_config(opened)


def test_unknown_architectures_list_the_known_ones(
    tiny: Tiny, write_safetensors: WriteSafetensors, write_gguf: WriteGGUF
) -> None:
    model = tiny("llama")
    for changes in (
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None, "model_type": "mamba"},
    ):
        with (
            open_checkpoint(
                write_safetensors({**model.config, **changes}, model.weights)
            ) as opened,
            pytest.raises(ModelError, match=r"Known are .*Gemma2ForCausalLM.*Qwen3ForCausalLM"),
        ):
            read_config(opened)
    with (
        open_checkpoint(write_gguf(model, {"general.architecture": "mamba"})) as opened,
        pytest.raises(ModelError, match=r"'mamba'.*gemma2, gemma3, .*llama, .*qwen2, .*qwen3"),
    ):
        read_config(opened)


@pytest.mark.parametrize("max_length", [0, -1, 1 << 31])
def test_max_length(
    max_length: int, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device
) -> None:
    model = tiny("llama")
    with (
        open_checkpoint(write_safetensors(model.config, model.weights)) as opened,
        pytest.raises(ConfigError, match="max_length"),
    ):
        load_model(opened, device, max_length=max_length)


def test_tensors_that_do_not_fit(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device
) -> None:
    model = tiny("llama")
    down = "model.layers.2.mlp.down_proj"
    missing = {key: value for key, value in model.weights.items() if key != f"{down}.weight"}
    turned = {**model.weights, f"{down}.weight": model.weights[f"{down}.weight"].T.copy()}
    denied = {**model.weights, f"{down}.bias": np.ones(32, np.float32)}
    normed = {**model.weights, "model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
    for weights, message in (
        (missing, rf"lacks tensor '{down}\.weight', expected with shape \(32, 48\)"),
        (turned, rf"'{down}\.weight' has shape \(48, 32\), expected \(32, 48\)"),
        (denied, rf"has tensor '{down}\.bias', for which llama"),
        (normed, r"has tensor 'model\.layers\.0\.self_attn\.q_norm\.weight', for which llama"),
    ):
        with (
            open_checkpoint(write_safetensors(model.config, weights)) as opened,
            pytest.raises(ModelError, match=message),
        ):
            load_model(opened, device)
    assert device.memory().used["weights"] == 0


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("qwen2moe", {"expert_shared_feed_forward_length": 0}, "expert_shared_feed_forward_length"),
        ("qwen3moe", {"expert_feed_forward_length": -1}, "expert_feed_forward_length"),
        ("gpt-oss", {"expert_count": 0}, "gpt-oss.expert_count"),
        ("granite", {"logit_scale": 0.0}, "granite.logit_scale"),
        ("stablelm", {"attention.layer_norm_epsilon": math.nan}, "attention.layer_norm_epsilon"),
        ("deepseek3", {"rope.dimension_count": 10}, "deepseek2.attention.key_length_mla"),
        ("deepseek3", {"attention.kv_lora_rank": 81}, "deepseek2.attention.kv_lora_rank"),
        ("deepseek3", {"attention.value_length_mla": 0}, "deepseek2.attention.value_length_mla"),
        ("deepseek3", {"expert_gating_func": 3}, "deepseek2.expert_gating_func"),
        ("deepseek3", {"expert_group_count": 3}, "deepseek2.expert_group_count"),
        ("deepseek3", {"expert_group_used_count": 3}, "deepseek2.expert_group_used_count"),
        ("deepseek3", {"leading_dense_block_count": -1}, "deepseek2.leading_dense_block_count"),
    ],
)
def test_gguf_metadata_of_other_families(
    name: str, changes: dict[str, Any], key: str, tiny: Tiny, write_gguf: WriteGGUF
) -> None:
    with (
        open_checkpoint(write_gguf(tiny(name), changes)) as opened,
        pytest.raises(ModelError, match=key),
    ):
        read_config(opened)


@pytest.mark.parametrize(
    ("name", "missing", "added", "message"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w2.weight", None, "lacks tensor .*experts.3.w2"),
        ("mixtral", None, "block_sparse_moe.experts.4.w2.weight", "has tensor .*experts.4.w2"),
        ("mixtral", None, "block_sparse_moe.gate.bias", "has tensor .*moe.gate.bias"),
        ("qwen2moe-dense", None, "mlp.shared_expert.up_proj.bias", "has tensor .*up_proj.bias"),
        ("phi3", None, "self_attn.q_proj.weight", "has tensor .*q_proj.weight"),
        ("phi3", "self_attn.qkv_proj.weight", None, "lacks tensor .*qkv_proj.weight"),
        ("gpt-oss", "self_attn.sinks", None, "lacks tensor .*self_attn.sinks"),
        ("gpt-oss", "mlp.experts.down_proj_bias", None, "lacks tensor .*down_proj_bias"),
        ("olmo2", None, "input_layernorm.weight", "has tensor .*input_layernorm"),
        ("stablelm", "input_layernorm.bias", None, "lacks tensor .*input_layernorm.bias"),
        ("deepseek2", None, "self_attn.q_proj.weight", "has tensor .*q_proj.weight"),
        ("deepseek2", None, "mlp.gate.e_score_correction_bias", "has tensor .*correction_bias"),
        ("deepseek3", "mlp.gate.e_score_correction_bias", None, "lacks tensor .*correction_bias"),
    ],
)
def test_tensors_of_other_families_that_do_not_fit(
    name: str,
    missing: str | None,
    added: str | None,
    message: str,
    tiny: Tiny,
    write_safetensors: WriteSafetensors,
    device: Device,
) -> None:
    model = tiny(name)
    weights = dict(model.weights)
    if missing is not None:
        del weights[f"model.layers.1.{missing}"]
    if added is not None:
        weights[f"model.layers.1.{added}"] = np.ones((32, 32), np.float32)
    with (
        open_checkpoint(write_safetensors(model.config, weights)) as opened,
        pytest.raises(ModelError, match=message),
    ):
        load_model(opened, device)
    assert device.memory().used["weights"] == 0


def test_as_many_experts_as_a_config_says_are_not_looked_for_in_vain(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device
) -> None:
    """4,096 layers of 16,384 experts are refused at the first tensor that is not there."""
    model = tiny("mixtral")
    config = {**model.config, "num_hidden_layers": 4096, "num_local_experts": 1 << 14}
    with (
        open_checkpoint(write_safetensors(config, model.weights)) as opened,
        pytest.raises(ModelError, match="has shape"),
    ):
        load_model(opened, device)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, HUGE, "yarn", "longrope", "dynamic", "llama3", "linear"])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention"]), inner)
    ),
    max_leaves=8,
)
cached_model = functools.cache(TinyModel)
OTHER_FAMILIES = (
    "mistral", "qwen3", "phi3-longrope", "mixtral", "qwen2moe", "qwen3moe", "gpt-oss", "olmo2",
    "granite", "glm", "glm4", "stablelm", "deepseek2", "deepseek2-lite", "deepseek3",
)  # fmt: skip
FAMILIES = {family.name: family for family in architectures()}


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_read_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["llama-yarn", "qwen2-sliding", "gemma3", *OTHER_FAMILIES]))
    model = cached_model(name)
    config = getattr(model, data.draw(st.sampled_from(["config", "legacy"])))
    fields = st.sampled_from(sorted(config))
    changes = data.draw(st.dictionaries(fields, JSON, min_size=1, max_size=3))
    family = find_hf(Fields(config, "config.json"), list(FAMILIES.values()))
    with contextlib.suppress(ModelError):
        result = family.read_hf(Fields({**config, **changes}, "config.json"), None)
        assert np.isfinite([rope.frequencies for rope in result.ropes if rope]).all()
        assert len(family.shapes(result)) > result.layers


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_metadata_is_read_or_refused(data: st.DataObject) -> None:
    names = [name for family in FAMILIES.values() for name in family.gguf_names]
    name = data.draw(st.sampled_from(names))
    metadata: dict[str, object] = {
        "general.architecture": name,
        "tokenizer.ggml.tokens": ("a", "b"),
        f"{name}.embedding_length": 32,
        f"{name}.attention.head_count": 4,
        f"{name}.attention.head_count_kv": 2,
        f"{name}.attention.key_length": 8,
        f"{name}.attention.value_length": 8,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{name}.attention.sliding_window": 8,
        f"{name}.attention.sliding_window_pattern": np.array([True, False]),
        f"{name}.block_count": 2,
        f"{name}.context_length": 64,
        f"{name}.feed_forward_length": 48,
        f"{name}.rope.freq_base": 1e4,
        f"{name}.rope.dimension_count": 4,
        f"{name}.attention.layer_norm_epsilon": 1e-5,
        f"{name}.attention.kv_lora_rank": 16,
        f"{name}.attention.q_lora_rank": 16,
        f"{name}.expert_count": 4,
        f"{name}.expert_used_count": 2,
        f"{name}.expert_feed_forward_length": 16,
        f"{name}.expert_shared_feed_forward_length": 16,
        f"{name}.expert_shared_count": 1,
        f"{name}.expert_gating_func": 2,
        f"{name}.expert_group_count": 2,
        f"{name}.expert_group_used_count": 1,
        f"{name}.leading_dense_block_count": 1,
        f"{name}.rope.scaling.yarn_log_multiplier": 0.1,
        f"{name}.rope.scaling.type": "yarn",
        f"{name}.rope.scaling.factor": 2.0,
        f"{name}.rope.scaling.original_context_length": 32,
    }
    values = JSON | st.lists(st.integers(-1, 9)).map(np.array)
    changes = data.draw(
        st.dictionaries(st.sampled_from(sorted(metadata)[1:]), values, min_size=1, max_size=3)
    )
    checkpoint: Any = SimpleNamespace(tensors={}, path="model.gguf")
    with contextlib.suppress(ModelError):
        result = FAMILIES[name].read_gguf(
            Fields({**metadata, **changes}, "model.gguf"), checkpoint, None
        )
        assert np.isfinite([rope.frequencies for rope in result.ropes if rope]).all()
