# SPDX-License-Identifier: Apache-2.0
"""One start with compiled models and what it decodes, for this process or one of its own:

python -m tests.serving.compiled TARGET HEAD
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.serving.harness import (
    echo_engine,
    plain_engine,
    random_prompts,
    token_ids,
    truths_of,
)

from vllm import SamplingParams  # isort: skip  (after the harness, which sets vLLM up)
from vllm.compilation.counter import compilation_counter  # isort: skip

ROOT = Path(__file__).parents[2]
PROMPTS = random_prompts(4, seed=5)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BUDGET = {"policy": "static", "k_max": 32}


@dataclass
class Start:
    """What an engine did with its models' code, and what came out."""

    compiled: int
    loaded: int
    saved: int
    tokens: list
    drafts: list
    """Of every step, what the head drafted for each request."""
    tokens_of_trees: list = field(default_factory=list)
    """What came out once more, with an oracle in the head's place."""
    accepted: int = 0
    """Of its nodes."""


def start_echo(target: Path, head: Path) -> Start:
    before = compilation_counter.clone()
    gc.collect()
    engine = echo_engine(target, head, echo=BUDGET, enforce_eager=False)
    drafts: list = []
    propose = engine.runner.propose_draft_token_ids

    def keep(*args, **kwargs):
        drafts.append(propose(*args, **kwargs))
        return drafts[-1]

    engine.runner.propose_draft_token_ids = keep
    outputs = engine.generate(PROMPTS, PARAMS)
    start = _outcome(before, token_ids(outputs), drafts)
    engine.record.clear()
    engine.follow(truths_of(outputs))
    trees = token_ids(engine.generate(PROMPTS, PARAMS))
    return replace(start, tokens_of_trees=trees, accepted=engine.record.accepted)


def start_plain(target: Path) -> Start:
    before = compilation_counter.clone()
    engine = plain_engine(target, enforce_eager=False)
    return _outcome(before, token_ids(engine.generate(PROMPTS, PARAMS)), [])


def start_in_a_process_of_its_own(target: Path, head: Path) -> Start:
    command = [sys.executable, "-m", "tests.serving.compiled", str(target), str(head)]
    # An engine in this process has changed what the compiler reads from its environment, and that
    # is part of the key; a process of its own starts as this one did.
    env = {name: os.environ[name] for name in os.environ if not name.startswith("TORCHINDUCTOR_")}
    output = subprocess.run(
        command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return Start(**json.loads(output.splitlines()[-1]))


def _outcome(before, tokens: list, drafts: list) -> Start:
    now = compilation_counter
    return Start(
        compiled=now.num_aot_compiles - before.num_aot_compiles,
        loaded=now.num_aot_artifacts_loaded - before.num_aot_artifacts_loaded,
        saved=now.num_aot_artifacts_saved - before.num_aot_artifacts_saved,
        tokens=tokens,
        drafts=list(drafts),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(start_echo(Path(sys.argv[1]), Path(sys.argv[2])))))
