"""Grammars are first compiled in a process of their own, which may die of them.

A grammar from a stranger can overflow the stack of native code, compile for minutes or take all
memory, and a thread that does so cannot be stopped. So each is tried in a small child process with
bounds on time and memory, and comes to the engine only when that went well. The child is this
module: it imports nothing else of polysilicon, reads grammars as JSON lines and answers each with a
line `{"error": ..., "bytes": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

SECONDS = 8
"""Processor time that one grammar's trial may take."""

MOST_BYTES = 1 << 27
"""Memory that one grammar's trial may take, where the kernel keeps to such bounds."""

_WALL_SECONDS = 60.0
_COMPILE_STACK = 64 << 20
_STEP_STACK = 512 << 10
"""The smallest stack of a thread that any platform gives: the engine's own is larger."""

_WALK = 48
"""Random tokens of one byte that a trial follows."""


def limits() -> LLParserLimits:
    """Bounds within llguidance: some milliseconds of work for one mask, and some 50 MB for one
    grammar's automaton."""
    return LLParserLimits(
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def run_with_stack(size: int, work: Any) -> Any:
    """What `work()` returns, called in a thread whose stack has `size` bytes."""
    results: list[Any] = []
    before = threading.stack_size(size)
    try:
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return results[0]


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's start, or in its error state."""
    matcher: LLMatcher = run_with_stack(
        _COMPILE_STACK, lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    )
    return matcher


class GrammarTrial:
    """Tries grammars in a child process, which is started when first needed. For one thread, but
    `kill` may come from another."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def error(self, grammar: str) -> str | None:
        """What is wrong with a grammar as llguidance takes it, or None."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "polysilicon.sampling.grammar_trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                # Every thread of its own would otherwise reserve address space of its own.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        answer = ""
        with contextlib.suppress(OSError):
            child.stdin.write(json.dumps(grammar) + "\n")
            child.stdin.flush()
            if _readable(child.stdout):
                answer = child.stdout.readline()
        if answer.endswith("\n"):
            error: str | None = json.loads(answer)
            return error
        self.close()
        return (
            f"it takes more than {SECONDS} s or {MOST_BYTES >> 20} MiB to compile, or nests too "
            "deeply: make it simpler"
        )

    def kill(self) -> None:
        """End the trial that runs; it comes back at once."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(OSError), child:  # closes the pipes and waits
                pass


def _readable(stream: Any) -> bool:
    """Whether a line or the end of the stream comes in time."""
    if sys.platform == "win32":  # pipes cannot be waited for there
        return True
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(_WALL_SECONDS))


class _Bytes:
    """The tokenizer of the trial: a token for each byte."""

    def __init__(self) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        self.tokens = [*(bytes((byte,)) for byte in range(256)), b"</s>"]
        self.special_token_ids = [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_tokenizer() -> LLTokenizer:
    """A tokenizer whose tokens 0 to 255 are the bytes."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _walk(matcher: LLMatcher) -> str:
    """Follow a pseudo-random text for a while; the error that this ends in, or nothing."""
    state = 1
    for _ in range(_WALK):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << 256) - 1)
        if not mask:
            break
        state = state * 6364136223846793005 + 1442695040888963407 & 0xFFFFFFFFFFFFFFFF
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        matcher.consume_token(allowed[(state >> 33) % len(allowed)])
    return matcher.get_error()


def _limit_memory() -> None:
    """Bound the address space anew; without /proc there is no telling what is in use already."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _COMPILE_STACK + MOST_BYTES, hard))


def _limit_time() -> None:
    """A fresh allowance of processor time, at whose end the kernel ends this process."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, hard))


def main() -> None:
    """The child: answers every line until its input ends."""
    tokenizer = byte_tokenizer()
    for line in sys.stdin:
        _limit_memory()
        _limit_time()
        matcher = compiled(tokenizer, json.loads(line))
        error = matcher.get_error()
        if not error:
            error = run_with_stack(_STEP_STACK, lambda matcher=matcher: _walk(matcher))
        print(json.dumps(error or None), flush=True)


if __name__ == "__main__":
    main()
