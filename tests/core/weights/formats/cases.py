"""Every way of storing the tiny Llama as safetensors that is tried."""

from __future__ import annotations

from . import (
    awq_cases,
    bitsandbytes_cases,
    compressed_tensors_cases,
    dense_cases,
    fp8_cases,
    gptq_cases,
    hqq_cases,
    mlx_cases,
    modelopt_cases,
    mxfp4_cases,
    torchao_cases,
)

CASES = [
    *dense_cases.CASES,
    *gptq_cases.CASES,
    *awq_cases.CASES,
    *mlx_cases.CASES,
    *bitsandbytes_cases.CASES,
    *hqq_cases.CASES,
    *compressed_tensors_cases.CASES,
    *fp8_cases.CASES,
    *modelopt_cases.CASES,
    *mxfp4_cases.CASES,
    *torchao_cases.CASES,
]
