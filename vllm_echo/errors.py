# SPDX-License-Identifier: Apache-2.0
"""The errors that vllm-echo raises on purpose.

They are meant for the person who started the program: one message, complete in
itself, printed without a traceback by every entry point of the project.
"""


class EchoError(Exception):
    """Base of all errors whose message is the whole story."""


class EchoConfigError(EchoError):
    """A configuration that cannot be served; says which key, why, and what would be right.

    Deliberately not a `ValueError`: pydantic turns those into its own multi-line report,
    and vLLM builds its configuration objects inside pydantic validators.
    """


class EchoPatchError(EchoError):
    """The installed vLLM cannot be patched or reverted as it is."""
