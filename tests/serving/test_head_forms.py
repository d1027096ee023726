# SPDX-License-Identifier: Apache-2.0
"""Heads in every form that is served: the output is plain decoding's, and the head was heard."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.heard import heard
from tests.integration.heads import kit
from tests.serving.harness import Engine, echo_engine, random_prompts, token_ids
from vllm_echo.integration.heads import loading

pytestmark = pytest.mark.timeout(400)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPTS = random_prompts(16, seed=3)
# The tiny head knows nothing of the tiny target: wide trees, so that some guesses are right.
WIDE = {"policy": "static", "k_max": 1000, "max_depth": 3, "top_k": 5}


def all_of(*forms: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        for form in forms:
            form(folder)
        return folder

    return change


def four_layers(folder: Path) -> Path:
    return kit.as_qwen3(folder, [0, 1, 2, 4])


def four_layers_of_a_llama(folder: Path) -> Path:
    """vLLM's Llama class counts three, whatever the ids at the top level say."""
    four_layers(folder)
    kit.change_tensors(
        folder, kit.drop("midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight")
    )
    return kit.change_config(folder, architectures=["LlamaForCausalLMEagle3"], model_type="llama")


def an_fc_that_is_switched_off(folder: Path) -> Path:
    """vLLM leaves it out because a key says so; we say it in the log."""
    return kit.change_config(folder, eagle_config={"use_aux_hidden_state": False})


def the_targets_output_layer(folder: Path) -> Path:
    kit.with_full_vocabulary(folder)
    return kit.change_tensors(folder, kit.drop("lm_head.weight", "d2t", "t2d"))


FORMS: dict[str, Callable[[Path], Path]] = {
    "as it is": lambda folder: folder,
    "qwen3 with four layers": four_layers,
    "speculators": kit.as_speculators,
    "speculators, qwen3, four layers": all_of(four_layers, kit.as_speculators),
    "llama with four layers": four_layers_of_a_llama,
    "speculators, llama, four layers": all_of(four_layers_of_a_llama, kit.as_speculators),
    "full vocabulary and a d2t of zeros": kit.with_full_vocabulary,
    "the target's output layer": the_targets_output_layer,
    "pytorch_model.bin": kit.as_bin,
    "head.pt": lambda folder: kit.as_bin(folder, "head.pt"),
    "shards": kit.as_shards,
    "projections stored together": kit.with_fused_projections,
    "norms before fc": kit.with_fc_norms,
    "biases": kit.with_biases,
    "projections in int8": kit.in_int8,
    "two layers": lambda folder: kit.with_layers(folder, 2),
    "no auxiliary layers": kit.without_aux_layers,
    "an fc that is switched off": an_fc_that_is_switched_off,
}


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[list[int]]]:
    return token_ids(plain.generate(PROMPTS, GREEDY))


def serve(target: Path, head: Path) -> Engine:
    return echo_engine(target, head, 12, WIDE, max_num_batched_tokens=4096)


def copy_of(head: Path, tmp_path: Path) -> Path:
    return shutil.copytree(head, tmp_path / "head")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_served_and_accepted(
    target: Path, head: Path, tmp_path: Path, expected: list, form: str
) -> None:
    engine = serve(target, FORMS[form](copy_of(head, tmp_path)))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.record.drafted > 0
    engine.record.require_tree_acceptance()


def drafted_and_accepted(engine: Engine) -> tuple[list, list[list[int]]]:
    """Tokens and acceptance, and every tree's tokens in order."""
    trees: list[list[int]] = []
    verifier = engine.runner.rejection_sampler
    forward = verifier.forward

    def watched(*args, **kwargs):
        if verifier._step is not None:
            trees.append(verifier._step.tree.tokens.tolist())
        return forward(*args, **kwargs)

    verifier.forward = watched
    tokens = token_ids(engine.generate(PROMPTS, GREEDY))
    engine.record.require_tree_acceptance()
    return [tokens, engine.record.accepted, engine.record.moved], trees


@pytest.mark.parametrize("form", [lambda folder: folder, kit.with_fc_norms], ids=["fc", "norms"])
def test_columns_in_another_order_draft_the_same_trees(
    target: Path, head: Path, tmp_path: Path, form: Callable[[Path], Path]
) -> None:
    """vLLM hands states out from the lowest layer up, whatever the order of the ids."""
    folder = form(copy_of(head, tmp_path))
    sorted_ids = drafted_and_accepted(serve(target, folder))
    kit.reordered(folder, [2, 0, 1])
    assert drafted_and_accepted(serve(target, folder)) == sorted_ids


def test_columns_left_in_the_written_order_draft_other_trees(
    target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above: what happens without the permutation."""
    sorted_ids = drafted_and_accepted(serve(target, head))
    folder = kit.reordered(copy_of(head, tmp_path), [2, 0, 1])
    monkeypatch.setattr(loading, "as_vllm_takes_them", lambda tensors, form: tensors)
    tokens, trees = drafted_and_accepted(serve(target, folder))
    assert tokens[0] == sorted_ids[0][0], "lossless all the same"
    assert trees != sorted_ids[1]


def run_real_head(demo: dict[str, str], folder: Path) -> tuple[list, int, int]:
    """Tokens, drafted and accepted nodes of a few greedy requests to the demo model."""
    engine = echo_engine(demo["model"], folder, 8, {"policy": "static"}, max_model_len=256)
    outputs = engine.generate([prompt[:40] for prompt in PROMPTS[:8]], GREEDY)
    engine.record.require_tree_acceptance()
    return token_ids(outputs), engine.record.drafted, engine.record.accepted


@pytest.fixture(scope="module")
def real_head(demo: dict[str, str]) -> tuple[list, int, int]:
    return run_real_head(demo, Path(demo["draft"]))


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (lambda folder: kit.reordered(folder, [2, 1, 0]), "[27, 15, 2]"),
        (
            lambda folder: kit.change_config(folder, eagle_aux_hidden_state_layer_ids=None),
            "guessed: [2, 15, 27]",
        ),
        (kit.as_bin, None),
    ],
    ids=["reordered", "guessed", "bin"],
)
def test_the_real_head_accepts_as_much_in_every_form(
    demo: dict[str, str],
    real_head: tuple[list, int, int],
    tmp_path: Path,
    form: Callable[[Path], Path],
    line: str | None,
) -> None:
    folder = form(copy_of(Path(demo["draft"]), tmp_path))
    with heard("vllm.vllm_echo.integration.heads.loading", logging.INFO) as lines:
        assert run_real_head(demo, folder) == real_head
    assert len(lines) == (line is not None), "one line in the log, where there is something to say"
    assert line is None or line in lines[0]
