"""What the machine gives at best: bandwidth of a copy on the device, rate of a large product."""

from __future__ import annotations

import sys

import torch
from measuring import Record, arguments, seconds_each, torch_device


def main() -> int:
    chosen = arguments()
    record, device = Record(chosen.out), torch_device(chosen.dry)
    size = 1 << (20 if chosen.dry else 32)
    with record.case(case="copy") as figures:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = seconds_each([lambda: target.copy_(source)], device)
        figures |= {"bytes_per_s": 2 * size / seconds, "bytes": size}
    with record.case(case="read") as figures:
        values = torch.zeros(size // 4, dtype=torch.float32, device=device)
        seconds = seconds_each([values.sum], device)
        figures |= {"bytes_per_s": size / seconds, "bytes": size}
    side = 128 if chosen.dry else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    with record.case(case="product") as figures:
        seconds = seconds_each([lambda: a @ b], device)
        figures |= {"flops_per_s": 2 * side**3 / seconds, "side": side}
    with record.case(case="product_fp8") as figures:
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
        one = torch.ones((), device=device)
        settings = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        seconds = seconds_each([lambda: torch._scaled_mm(a8, b8, **settings)], device)
        figures |= {"flops_per_s": 2 * side**3 / seconds, "side": side}
    return 0


if __name__ == "__main__":
    sys.exit(main())
