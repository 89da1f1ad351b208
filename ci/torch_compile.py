#!/usr/bin/env python3
"""Compile the Triton kernels of the torch backends ahead of time, without a GPU.

`ci/torch_compile.py [--vendor cuda|rocm] [--targets sm_90,gfx942] [--kernels attention]
[--most N | --all]`

Every `specialisations` of the modules in `polysilicon_torch/triton` (with `--all`, their
`more_specialisations` too) is compiled for every target with the tuning tables that serve it there.
The check fails on a compile error, on one that takes longer than `--cap` seconds, on more shared
memory (or, on sm_100, tensor memory) than the target has, and on register spills in kernels of the
decode path. It prints a table and, with `--json FILE`, keeps it as JSON. Results are cached by the
kernels' source, so that a second run compiles only what changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for package in ("torch", "cuda", "rocm"):
    sys.path.insert(0, str(ROOT / "backends" / package))

os.environ.pop("TRITON_INTERPRET", None)  # with it, kernels are not of the compiler's kind

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import polysilicon_torch.triton as kernels  # noqa: E402
from polysilicon_torch.specialisation import Specialisation  # noqa: E402
from polysilicon_torch.target import TARGETS, Target  # noqa: E402
from polysilicon_torch.tuning import Tuning  # noqa: E402

VENDORS = {
    "cuda": ("sm_80", "sm_89", "sm_90", "sm_100"),
    "rocm": ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
}
TENSOR_MEMORY_COLUMNS = 512
FORMAT = 2
"""Counts up when what a result holds, or how it is found, changes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    module: str
    target: Target
    specialisation: Specialisation

    @functools.cached_property
    def key(self) -> str:
        """The hash of all that the result depends on."""
        item = self.specialisation
        parts = (
            FORMAT,
            triton.__version__,
            self.target.name,
            item.kernel.cache_key,
            list(item.signature.items()),
            sorted((name, str(value)) for name, value in item.constexprs.items()),
            sorted(item.divisible),
            sorted(item.options.items()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """error: empty where it compiled. registers: of a thread (on HIP, vector registers). spilled to
    memory: in bytes of a thread on CUDA, in vector registers on HIP. scalar_spilled: scalar
    registers that HIP keeps in lanes of a vector register instead, which costs no memory traffic.
    shared: bytes of a block. tensor_memory: columns. seconds: what the compile took."""

    error: str = ""
    registers: int = 0
    spilled: int = 0
    scalar_spilled: int = 0
    shared: int = 0
    tensor_memory: int = 0
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile Triton kernels ahead of time.")
    parser.add_argument("--vendor", choices=list(VENDORS), help="only the targets of one vendor")
    parser.add_argument("--targets", help="only these targets, with commas")
    parser.add_argument("--kernels", help="only modules or specialisations with one of these words")
    parser.add_argument("--all", action="store_true", help="the further specialisations too")
    parser.add_argument(
        "--most", type=int, help="so many specialisations of a module at most, of all its kernels"
    )
    parser.add_argument("--cap", type=float, default=300, help="seconds that one compile may take")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--json", type=Path, help="where to keep the results")
    parser.add_argument("--no-cache", action="store_true", help="compile everything anew")
    chosen = parser.parse_args(arguments)
    names = [name for vendor in VENDORS for name in VENDORS[vendor]]
    if chosen.targets:
        names = chosen.targets.split(",")
    elif chosen.vendor:
        names = list(VENDORS[chosen.vendor])
    if strange := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {', '.join(strange)}: there are {', '.join(TARGETS)}")
    jobs = [
        job
        for job in find_jobs([TARGETS[name] for name in names], chosen.all, chosen.most)
        if not chosen.kernels
        or any(
            word in f"{job.module} {job.specialisation.name}" for word in chosen.kernels.split(",")
        )
    ]
    if not jobs:
        print("no kernel fits", file=sys.stderr)
        return 2
    begin = time.monotonic()
    results = run(jobs, chosen.jobs, chosen.cap, None if chosen.no_cache else cache_folder())
    rows = [row(job, result) for job, result in zip(jobs, results, strict=True)]
    print(table(rows))
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(
            json.dumps({"triton": triton.__version__, "kernels": rows}, indent=1)
        )
    failed = [entry for entry in rows if entry["problems"]]
    for entry in failed:
        what = f"{entry['module']}: {entry['name']} on {entry['target']}"
        print(f"FAILED {what}: {'; '.join(entry['problems'])}")
    print(
        f"triton {triton.__version__}: {len(rows)} compilations for {', '.join(names)}:"
        f" {len(failed)} failed ({time.monotonic() - begin:.0f} s)"
    )
    return 1 if failed else 0


def find_jobs(targets: Sequence[Target], everything: bool, most: int | None) -> Iterator[Job]:
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        sources = ["specialisations", "more_specialisations"] if everything else ["specialisations"]
        for target in targets:
            tuning = Tuning.of(target, vendor_table(target))
            items = [
                item
                for source in sources
                for item in getattr(module, source, lambda target, tuning: ())(target, tuning)
            ]
            for item in sample(items, most):
                yield Job(module=found.name, target=target, specialisation=item)


def sample(items: Sequence[Specialisation], most: int | None) -> Sequence[Specialisation]:
    """At most so many, of as many kernels as that allows, spread over each one's."""
    if most is None or len(items) <= most:
        return items
    by_kernel: dict[str, list[Specialisation]] = {}
    for item in items:
        by_kernel.setdefault(item.kernel.__name__, []).append(item)
    quota = dict.fromkeys(by_kernel, 0)
    for name in itertools.islice(itertools.cycle(by_kernel), most):
        quota[name] += 1
    return [
        own[index * len(own) // min(quota[name], len(own))]
        for name, own in by_kernel.items()
        for index in range(min(quota[name], len(own)))
    ]


def vendor_table(target: Target) -> Any:
    """The tuning table of the backend that serves the target."""
    vendor = "cuda" if target.kind == "cuda" else "rocm"
    return importlib.import_module(f"polysilicon_{vendor}.tables").table()


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root).expanduser() / "polysilicon" / "compile-check"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(jobs: Sequence[Job], workers: int, cap: float, cache: Path | None) -> list[Result]:
    """The results of all jobs, in order, from the cache or from worker processes."""
    results: dict[str, Result] = {}
    for job in jobs:
        path = cache / f"{job.key}.json" if cache else None
        if path and path.exists():
            results[job.key] = Result(**json.loads(path.read_text()))
    missing = list({job.key: job for job in jobs if job.key not in results}.values())
    print(f"{len(jobs)} compilations, {len(missing)} of them not in the cache", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for job, result in compile_all(missing, workers, cap):
            results[job.key] = result
            if cache and not result.error:
                (cache / f"{job.key}.json").write_text(json.dumps(dataclasses.asdict(result)))
    return [results[job.key] for job in jobs]


class Worker:
    """A process that compiles one job after another and can be killed in the midst of one."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, child = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(child,), daemon=True)
        self.process.start()
        child.close()
        self.job: Job | None = None
        self.begin = 0.0

    def submit(self, job: Job, index: int) -> None:
        self.job = job
        self.begin = time.monotonic()
        self.pipe.send(index)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_JOBS: list[Job] = []
"""What forked workers find by index: kernels cannot be sent through a pipe."""


def compile_all(jobs: Sequence[Job], workers: int, cap: float) -> Iterator[tuple[Job, Result]]:
    _JOBS[:] = jobs
    todo = list(range(len(jobs)))[::-1]
    busy: list[Worker] = []
    idle: list[Worker] = []
    while todo or busy:
        while todo and len(busy) < workers:
            worker = idle.pop() if idle else Worker()
            index = todo.pop()
            worker.submit(jobs[index], index)
            busy.append(worker)
        next_end = min(worker.begin for worker in busy) + cap
        ready = multiprocessing.connection.wait(
            [worker.pipe for worker in busy], max(0.0, next_end - time.monotonic())
        )
        for worker in list(busy):
            assert worker.job is not None
            if worker.pipe in ready:
                try:
                    result = worker.pipe.recv()
                    idle.append(worker)
                except EOFError:
                    result = Result(error=f"the compiler died (status {worker.process.exitcode})")
                    worker.kill()
            elif time.monotonic() - worker.begin > cap:
                result = Result(error=f"no end after {cap:.0f} s", seconds=cap)
                worker.kill()
            else:
                continue
            busy.remove(worker)
            yield worker.job, result
    for worker in idle:
        worker.kill()


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while True:
        try:
            pipe.send(compile_one(_JOBS[pipe.recv()]))
        except EOFError:
            return


def compile_one(job: Job) -> Result:
    """Compile and read the resources from the binary. Whatever the compiler raises is an error of
    the result: its innermost cause, for the outer ones quote callers."""
    item = job.specialisation
    begin = time.monotonic()
    try:
        compiled = triton.compile(
            source(item),
            target=GPUTarget(job.target.kind, architecture(job.target), job.target.warp_size),
            options=dict(item.options),
        )
        seconds = time.monotonic() - begin
        resources = (
            cuda_resources(compiled.asm["cubin"])
            if job.target.kind == "cuda"
            else hip_resources(compiled.asm["amdgcn"])
        )
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        return Result(error=text[-600:], seconds=time.monotonic() - begin)
    return dataclasses.replace(
        resources,
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", 0) or 0,
        seconds=round(seconds, 2),
    )


def architecture(target: Target) -> int | str:
    return int(target.name.removeprefix("sm_")) if target.kind == "cuda" else target.name


def source(item: Specialisation) -> Any:
    names = item.kernel.arg_names
    strange = (item.signature.keys() | item.constexprs.keys()) ^ set(names)
    if strange:
        raise ValueError(f"the specialisation and the kernel differ in {', '.join(strange)}")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in item.divisible or item.signature.get(name, "").startswith("*")
    }
    return ASTSource(
        fn=item.kernel,
        signature={name: item.signature.get(name, "constexpr") for name in names},
        constexprs=dict(item.constexprs),
        attrs=aligned,
    )


def cuda_resources(cubin: bytes) -> Result:
    """What a thread takes. Triton's kernels keep nothing on the stack but spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise ValueError("cuobjdump says nothing of the registers")
    return Result(registers=int(found[1]), spilled=int(found[2]) + int(found[3]))


def hip_resources(assembly: str) -> Result:
    """What a lane takes, from the metadata at the end of the assembly."""
    found = dict(re.findall(r"^\s*\.(vgpr_count|[vs]gpr_spill_count):\s*(\d+)", assembly, re.M))
    return Result(
        registers=int(found["vgpr_count"]),
        spilled=int(found["vgpr_spill_count"]),
        scalar_spilled=int(found["sgpr_spill_count"]),
    )


def row(job: Job, result: Result) -> dict[str, Any]:
    item = job.specialisation
    return {
        "module": job.module,
        "name": item.name,
        "target": job.target.name,
        "decode": item.decode,
        "options": dict(item.options),
        **dataclasses.asdict(result),
        "problems": problems(job, result),
    }


def problems(job: Job, result: Result) -> list[str]:
    if result.error:
        return [result.error]
    found = []
    if result.shared > job.target.shared_memory:
        found.append(f"{result.shared} bytes of shared memory, of {job.target.shared_memory}")
    if result.tensor_memory > TENSOR_MEMORY_COLUMNS:
        found.append(f"{result.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}")
    if job.specialisation.decode and result.spilled:
        found.append(f"a decode kernel spills {result.spilled}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a specialisation, one column a target: registers/kilobytes of shared memory, and
    what is spilled."""
    targets = list(dict.fromkeys(entry["target"] for entry in rows))
    lines: dict[str, dict[str, str]] = {}
    for entry in rows:
        title = f"{entry['module']}: {entry['name']}{' *' if entry['decode'] else ''}"
        spilled = f" spill {entry['spilled']}" if entry["spilled"] else ""
        cell = f"{entry['registers']}/{-(-entry['shared'] // 1024)}K{spilled}"
        lines.setdefault(title, {})[entry["target"]] = "FAILED" if entry["problems"] else cell
    width = max(map(len, lines))
    wide = {
        target: max(len(target), *(len(cells.get(target, "")) for cells in lines.values()))
        for target in targets
    }
    heading = f"{'registers/shared memory (*: decode)':{width}}"
    text = ["  ".join([heading, *(f"{target:>{wide[target]}}" for target in targets)])]
    for title, cells in lines.items():
        columns = (f"{cells.get(target, '-'):>{wide[target]}}" for target in targets)
        text.append("  ".join([f"{title:{width}}", *columns]))
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
