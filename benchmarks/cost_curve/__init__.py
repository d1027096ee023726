# SPDX-License-Identifier: Apache-2.0
"""Does a server get by with a cost curve that is wrong (spoilt), and does every start come to the
same one (starts)?"""

import argparse
from typing import Any

from benchmarks.serving.engines import needs_quiet_start, prepare_demo, read_config


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Which model, and which echo configuration."""
    parser.add_argument("--model", help="with --speculative-config; default: the demo pair")
    parser.add_argument("--speculative-config", help="inline or a file, without echo.profile")


def pair_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[str, dict[str, Any]]:
    """Model and echo configuration of a server that measures its own cost curve."""
    if (options.model is None) != (options.speculative_config is None):
        parser.error("--model and --speculative-config go together")
    if options.model is None:
        model, config = prepare_demo()
    else:
        model, config = options.model, read_config(options.speculative_config)
    if not needs_quiet_start(config):
        parser.error("the configuration has echo.profile, or needs none; take it out")
    return model, config
