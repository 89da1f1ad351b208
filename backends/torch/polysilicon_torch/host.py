"""The torch device in the host's memory, for tests: plain torch, or Triton's interpreter.

It is no installed backend: a vendor's package names one in its module `host`, and a test or the
conformance kit names that:

    pytest --pyargs polysilicon.testing.conformance \\
        --polysilicon-backend polysilicon_cuda.host:cuda-host --polysilicon-option activations=f32

The option `kernels` says what it computes with: `torch`, plain operations, or `triton`, the Triton
kernels, tuned for the architecture that the option `target` names. Those need TRITON_INTERPRET=1 in
the environment before Triton is imported, and are the default there.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence

from polysilicon.backend import CONTRACT_VERSION, Device, DeviceInfo, Unavailable
from polysilicon.host_memory import total_memory
from polysilicon_torch.presence import Vendor

_UNITS = 2
"""Compute units of the card that is interpreted: work is split among so many, so that there are
splits to merge, but few."""


class HostBackend:
    """Opens torch devices on the host with the tables of a vendor's package, `package.tables`.

    targets: names of architectures, the default first.
    """

    contract = CONTRACT_VERSION
    priority = 0

    def __init__(self, vendor: Vendor, package: str, targets: Sequence[str]) -> None:
        self.name = f"{vendor.backend}-host"
        self._package = package
        self._targets = targets

    def probe(self) -> Sequence[DeviceInfo] | Unavailable:
        needed = ("torch", "triton") if interpreting() else ("torch",)
        for module in needed:
            if importlib.util.find_spec(module) is None:
                return Unavailable(reason=f"{module} is not installed: pip install {module}")
        return (DeviceInfo(name="host", memory=total_memory(), stand_in=True),)

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        if index != 0:
            raise ValueError(f"{self.name} has device 0 only, got {index}")
        from polysilicon_torch.device import TorchDevice
        from polysilicon_torch.options import Options
        from polysilicon_torch.runtime import HostRuntime

        given = dict(options)
        kernels = given.pop("kernels", "triton" if interpreting() else "torch")
        target = given.pop("target", self._targets[0])
        if target not in self._targets:
            raise ValueError(f"target is one of {', '.join(self._targets)}, got {target!r}")
        parsed = Options.parse(self.name, given)
        runtime = HostRuntime()
        if kernels == "torch":
            if parsed.fp8:
                raise ValueError("activations=fp8 needs the Triton kernels: kernels=triton")
            from polysilicon_torch.torch_kernels import TorchKernels

            return TorchDevice(runtime, TorchKernels(parsed.activations), parsed)
        if kernels != "triton" or not interpreting():
            raise ValueError(
                "kernels is torch, or with TRITON_INTERPRET=1 in the environment triton, got "
                f"{kernels!r}"
            )
        from polysilicon_torch.target import named
        from polysilicon_torch.triton_kernels import TritonKernels
        from polysilicon_torch.tuning import Tuning

        table = importlib.import_module(f"{self._package}.tables").table()
        card = dataclasses.replace(named(target), compute_units=_UNITS)
        # What the interpreter takes goes by the number of programs.
        tuning = Tuning.of(card, table).over("prepare", {"BLOCK_T": 16})
        triton = TritonKernels(parsed.activations, runtime.device, tuning, fp8=parsed.fp8)
        return TorchDevice(runtime, triton, parsed)


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter, which it decides when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
