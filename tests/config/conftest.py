# SPDX-License-Identifier: Apache-2.0
"""A tiny model and a head that fits it."""

from pathlib import Path

import pytest

from tests.serving import tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_head(tmp_path_factory.mktemp("head"))
