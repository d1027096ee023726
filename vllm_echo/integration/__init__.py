# SPDX-License-Identifier: Apache-2.0
"""Where vllm_echo meets vLLM: the only package of the project that imports it.

The modules on this level are called by the patched vLLM while vLLM itself is being imported, so
none of them imports vLLM at its top.
"""
