"""The wheel's build hook: compiles what the backends bring in native code.

Where that cannot be done the wheel is a pure one that says why (`polysilicon backends` prints it):
an installation never fails for the lack of a compiler.

Environment: POLYSILICON_CPU_BUILD=0 leaves the native library out; POLYSILICON_CPU_BUILD=zig builds
it with the compiler of the PyPI package `ziglang`, which is large.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "POLYSILICON_CPU_BUILD"
FAILURE = "build-failure.txt"
PACKAGE = "polysilicon_cpu"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        choice = os.environ.get(SWITCH, "1")
        if choice == "0":
            return []
        tools = ["cmake>=3.20", "ninja"]
        return [*tools, "ziglang"] if choice == "zig" else tools

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build into the source tree for an editable installation, else into the wheel alone."""
        package = Path(self.root) / "backends" / "cpu" / PACKAGE
        builder = _load(package / "native" / "build.py")
        editable = version == "editable"
        folder = package if editable else Path(tempfile.mkdtemp(prefix="polysilicon-"))
        library, failure = folder / builder.LIBRARY, folder / FAILURE
        try:
            if os.environ.get(SWITCH) == "0":
                raise builder.BuildError(f"{SWITCH}=0 left it out")
            objects = builder.OBJECTS if editable else folder / "objects"
            builder.build(library, directory=objects, zig=os.environ.get(SWITCH) == "zig")
        except builder.BuildError as error:
            self.app.display_warning(f"The cpu backend's native library is not built: {error}")
            library.unlink(missing_ok=True)
            failure.write_text(str(error).splitlines()[0] + "\n")
            made = failure
        else:
            failure.unlink(missing_ok=True)
            made = library
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
        if not editable:
            build_data["force_include"][str(made)] = f"{PACKAGE}/{made.name}"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("polysilicon_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
