"""vLLM's side of a comparison, in its own environment: its engine with the scheduler, sampling
included, on token ids. Standard library and vllm only.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from sides import serve

ENVIRONMENT = {
    # Its scheduler's own process polls, and would take one of the threads' cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # As vLLM sets it for its workers; Intel's runtime is what it recommends.
    "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
}

STEP_TOKENS = 4096


class VLLM:
    def __init__(self, model: str, threads: int, streams: int, length: int) -> None:
        import vllm

        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=length,
            max_num_seqs=max(streams, 1),
            max_num_batched_tokens=max(STEP_TOKENS, length),
            enable_prefix_caching=True,
            disable_log_stats=True,
        ).llm_engine
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._count = 0
        self._warm: set[tuple[str, int, int]] = set()

    def build(self) -> dict[str, object]:
        """Which vLLM this is, and with what it runs."""
        import torch
        import vllm

        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "openmp": Path(os.environ["LD_PRELOAD"]).name,
        }

    def rate(self, work: str, tokens: int, streams: int, output: int, seed: int) -> float:
        if (work, tokens, streams) not in self._warm:
            self._warm.add((work, tokens, streams))
            self.rate(work, tokens, streams, output, seed - 1)  # compiles what is missing yet
        if work == "prefill":
            prompts = self._prompts(1, tokens, seed)
            began = time.perf_counter()
            self._run(prompts, 1)
            return tokens / (time.perf_counter() - began)
        # Decoding is timed behind what is cached, so that all streams begin together.
        prompts = self._prompts(streams, tokens, streams)
        self._run(prompts, 1)
        return self._run(prompts, output)

    def _prompts(self, streams: int, tokens: int, seed: int) -> list[list[int]]:
        draw = random.Random(f"{streams} {tokens} {seed}")
        return [[draw.randrange(self._vocabulary) for _ in range(tokens)] for _ in range(streams)]

    def _run(self, prompts: list[list[int]], output: int) -> float:
        """Tokens per second from when every stream has its first token."""
        params = self._params(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        lengths: dict[str, int] = {}
        for prompt in prompts:
            self._count += 1
            name = str(self._count)
            lengths[name] = 0
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        began, before = time.perf_counter(), 0
        started = False
        while self._engine.has_unfinished_requests():
            for result in self._engine.step():
                lengths[result.request_id] = len(result.outputs[0].token_ids)
            if not started and all(lengths.values()):
                started, began, before = True, time.perf_counter(), sum(lengths.values())
        return (sum(lengths.values()) - before) / (time.perf_counter() - began)


def restart() -> None:
    """Begin again with the environment that libraries read when they are loaded."""
    threads = json.loads(sys.argv[1])[1]
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    chosen = ENVIRONMENT | {
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{processors}]",
    }
    if any(os.environ.get(name) != value for name, value in chosen.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | chosen)


if __name__ == "__main__":
    restart()
    serve(VLLM)
