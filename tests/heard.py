# SPDX-License-Identifier: Apache-2.0
"""What a logger was told, whoever else listens to it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def heard(name: str, level: int) -> Iterator[list[str]]:
    """The messages of logger ``name``, from ``level`` on. Unlike pytest's caplog, each of them
    once, and all of them, whether or not vLLM has cut its loggers off from the root by then."""
    logger, lines = logging.getLogger(name), _Lines()
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(level)
    try:
        yield lines.texts
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)
