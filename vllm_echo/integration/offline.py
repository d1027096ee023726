# SPDX-License-Identifier: Apache-2.0
"""An engine in the hands of `calibrate` and `profile`: no server, our own measurements."""

import multiprocessing.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm_echo.core.config import METHOD
from vllm_echo.core.trace import DraftTrace

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # GiB. Without it vLLM takes most of the memory that the machine has, not that is free.
    "VLLM_CPU_KVCACHE_SPACE": "2",
}
"""What an engine of ours runs with, where the caller's environment does not say otherwise."""

_SHUTDOWN_SECONDS = 30.0


class OfflineEngine:
    """One vLLM engine with echo, as it would be served, driven from here."""

    def __init__(
        self,
        model: str,
        draft: str,
        options: dict[str, Any],
        num_speculative_tokens: int,
        engine_args: dict[str, Any],
    ):
        """``options`` are those of the key "echo"; ``engine_args`` are vLLM's own."""
        for name, value in _ENVIRONMENT.items():
            os.environ[name] = os.environ.get(name) or value
        from vllm import LLM

        self._num_speculative_tokens = num_speculative_tokens
        self._options = options
        with _openmp_preloaded(), _only_we_are_interrupted():
            self._llm = LLM(
                model=model,
                speculative_config={
                    "method": METHOD,
                    "model": draft,
                    "num_speculative_tokens": num_speculative_tokens,
                    "echo": options,
                },
                enable_prefix_caching=False,
                **engine_args,
            )

    @property
    def dtype(self) -> str:
        return str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")

    @property
    def max_model_len(self) -> int:
        return self._llm.llm_engine.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._llm.llm_engine.model_config.get_vocab_size()

    def chat_tokens(self, question: str, room: int) -> list[int]:
        """Token ids of a question in the model's chat format (as plain text where it has none),
        its middle left out when it is longer than ``room``."""
        tokenizer = self._llm.get_tokenizer()
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": question}]
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            tokens = tokenizer.encode(question)
        if len(tokens) > room:
            tokens = tokens[: room // 2] + tokens[-(room - room // 2) :]
        return list(tokens)

    def record(
        self, prompts: Sequence[list[int]], temperature: float, output_tokens: int, seed: int
    ) -> DraftTrace:
        """Answer ``prompts`` together; the draft trace of every output position.

        Interrupted, the engine is of no more use: one that ends answers no calls."""
        self._rpc("start_echo_recording")
        self._generate(prompts, temperature, output_tokens, seed, ignore_eos=False)
        trace = DraftTrace.from_bytes(self._rpc("take_echo_recording"))
        self._rpc("stop_echo_recording")
        return trace

    def step_log(
        self, prompts: Sequence[list[int]], options: dict[str, Any], output_tokens: int
    ) -> list[dict[str, Any]]:
        """Answer ``prompts`` together under other ``options``; the times of every step.

        Interrupted, the engine is of no more use."""
        base = {"num_speculative_tokens": self._num_speculative_tokens, **self._options}
        self._rpc("set_echo_options", {**base, **options})
        self._rpc("start_echo_step_log")
        self._generate(prompts, 0.0, output_tokens, 0, ignore_eos=True)
        return self._rpc("take_echo_step_log")

    def _generate(
        self,
        prompts: Sequence[list[int]],
        temperature: float,
        output_tokens: int,
        seed: int,
        *,
        ignore_eos: bool,
    ) -> None:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=output_tokens,
                seed=seed + index if temperature else None,
                ignore_eos=ignore_eos,
                detokenize=True,
            )
            for index in range(len(prompts))
        ]
        # All are there before the first step: else which requests share a step, and with it the
        # last bits of their logits, is up to the timing of two processes.
        self._llm.sleep(level=0, mode="keep")
        self._llm.enqueue(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        self._llm.wake_up(tags=["scheduling"])
        self._llm.wait_for_completion(use_tqdm=False)

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_SECONDS)


def intel_openmp(preloaded: str) -> Path | None:
    """The library that vLLM wants to be preloaded on x86, where it is installed and ``preloaded``,
    as in LD_PRELOAD, has no OpenMP: a process holds one."""
    library = Path(sys.prefix, "lib", "libiomp5.so")
    there = any(name in preloaded for name in ("libiomp", "libomp", "libgomp"))
    return library if library.is_file() and not there else None


@contextmanager
def _openmp_preloaded() -> Iterator[None]:
    """Processes that are started meanwhile load Intel's OpenMP first, as ``scripts/serve.sh``
    does."""
    before = os.environ.get("LD_PRELOAD")
    library = intel_openmp(before or "")
    if library is not None:
        os.environ["LD_PRELOAD"] = f"{before}:{library}" if before else str(library)
    try:
        yield
    finally:
        # vLLM adds libraries of its own.
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before


class _Interrupted(BaseException):
    """A KeyboardInterrupt that vLLM's start does not swallow."""


@contextmanager
def _only_we_are_interrupted() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal. Those that are started meanwhile do not hear it:
    they would die in the middle of a step, with a traceback each. We do."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_deaf(*args: Any) -> int:
        # A process inherits the mask of the thread that starts it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return spawn(*args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def interrupt(*_: Any) -> None:
        raise _Interrupted

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        with patch.object(multiprocessing.util, "spawnv_passfds", spawn_deaf):
            yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, handler)
