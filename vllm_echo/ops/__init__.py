# SPDX-License-Identifier: Apache-2.0
"""Typed wrappers over the compiled operators (csrc/), checked at the door.

Words used below:

- R requests, T rows of all requests together, request-major; row 0 of a request is the root of
  its tree, the other rows are its nodes. Row indices inside a request are *local*.
- A *slot* is a logical KV position of a request (0 = its first token); row i of a tree sits at
  slot root + i. The block table maps logical block ``slot // block_size`` to a physical block.
- The CPU cache layout of vLLM 0.32 (attention isa ``vec`` and ``vec16``): a layer's raw cache is
  [num_blocks, num_kv_heads, block_size, 2 * head_size]. Per block and head it holds the keys as
  [head_size, block_size] (dim-major) and then the values as [block_size, head_size], for all
  dtypes alike. The isa ``amx`` packs differently and is not supported.

Every operator checks its arguments before it writes anything: a wrong dtype, shape or value (a
block number outside the cache, say) raises ValueError, a wrong device TypeError; the message names
the tensor. Nothing is ever read or written out of bounds. The checks are in C++, where they cost
little even at one call a layer, and hold for direct calls of ``torch.ops.vllm_echo`` too.

``CUDA_OPERATORS`` run on a CUDA device, too, where the build has its kernels (``build_info``).
Nothing there waits for the device, so that all may be captured in a graph: sizes that depend on
values must be given (``max_rows``, ``max_nodes``), and values cannot be refused. A malformed one
leads to an empty acceptance, a detached node or a move that is left out, of that request alone.
"""

from vllm_echo.ops import fakes as fakes
from vllm_echo.ops.accept import accept_greedy as accept_greedy
from vllm_echo.ops.accept import accept_paths as accept_paths
from vllm_echo.ops.accept import accept_sampled as accept_sampled
from vllm_echo.ops.accept import commit_kv as commit_kv
from vllm_echo.ops.build import build_info as build_info
from vllm_echo.ops.build import set_simd_level as set_simd_level
from vllm_echo.ops.draft import append_layer as append_layer
from vllm_echo.ops.draft import expect_gain as expect_gain
from vllm_echo.ops.draft import grant_layer as grant_layer
from vllm_echo.ops.draft import next_frontier as next_frontier
from vllm_echo.ops.draft import score_children as score_children
from vllm_echo.ops.library import CUDA_OPERATORS as CUDA_OPERATORS
from vllm_echo.ops.schedule import admit_nodes as admit_nodes
from vllm_echo.ops.schedule import fastest_size as fastest_size
from vllm_echo.ops.schedule import order_trees as order_trees
from vllm_echo.ops.schedule import schedule_budget as schedule_budget
from vllm_echo.ops.verify import pack_trees as pack_trees
from vllm_echo.ops.verify import read_trees as read_trees
from vllm_echo.ops.verify import tree_attention as tree_attention
from vllm_echo.ops.verify import tree_part_attention as tree_part_attention
