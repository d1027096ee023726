# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo doctor`: could this machine serve with echo, and if not, what would help?

Every check answers with a fact and, when it fails, a remedy. Exit status 0 means that all required
checks are fine. Checks that need an earlier one are left out when it failed.
"""

import json
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_echo.errors import EchoError, EchoPatchError
from vllm_echo.version import __version__

PYTHONS = ((3, 11), (3, 12))


@dataclass(frozen=True)
class Check:
    """One answer. Only `required` ones decide whether echo could serve."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


def run_doctor(demo_dir: Path | None, *, as_json: bool) -> int:
    """Print the checks; 0 when echo could serve, 1 when not."""
    checks = collect_checks(demo_dir)
    could_serve = all(check.ok for check in checks if check.required)
    if as_json:
        answers = {check.name: asdict(check) for check in checks}
        print(json.dumps({"could_serve": could_serve, "checks": answers}))
    else:
        for check in checks:
            mark = "ok     " if check.ok else "PROBLEM" if check.required else "note   "
            print(f"{mark} {check.name}: {check.detail}")
            if check.remedy:
                print(f"        -> {check.remedy}")
        print(f"echo {'could' if could_serve else 'could not'} serve on this machine")
    return 0 if could_serve else 1


def collect_checks(demo_dir: Path | None) -> list[Check]:
    """All checks in the order in which their remedies make sense."""
    checks = [_check_python(), Check("vllm_echo", True, __version__)]
    torch = _check_torch()
    checks.append(torch)
    if torch.ok:
        checks.append(_check_operators())
    vllm = _check_vllm()
    checks.append(vllm)
    if vllm.ok:
        checks.append(_check_patches())
        if all(check.ok for check in checks):
            checks += _check_serving()
    checks += _check_demo(demo_dir)
    return checks


def _check_python() -> Check:
    known = sys.version_info[:2] in PYTHONS
    remedy = "" if known else "the project is tested on Python 3.11 and 3.12"
    detail = f"{platform.python_version()} in {sys.prefix}"
    return Check("python", known, detail, remedy, required=False)


def _check_torch() -> Check:
    try:
        return Check("torch", True, version("torch"))
    except PackageNotFoundError:
        return Check("torch", False, "not installed", "run scripts/install.sh")


def _check_operators() -> Check:
    remedy = "run `pip install -e . --no-deps --no-build-isolation` in the project's folder"
    try:
        from vllm_echo import ops

        info = ops.build_info()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines()
        return Check("operators", False, f"not usable ({reason[0] if reason else error})", remedy)
    detail = ", ".join(f"{key} {value}" for key, value in info.items())
    return Check("operators", True, detail)


def _check_vllm() -> Check:
    from vllm_echo.integration.compat import VLLM_VERSION
    from vllm_echo.integration.patching import find_installation

    try:
        found = find_installation()
    except EchoPatchError as error:
        return Check("vllm", False, "not installed", str(error))
    ok = found.version == VLLM_VERSION
    remedy = "" if ok else f"echo needs {VLLM_VERSION}: run scripts/install.sh"
    return Check("vllm", ok, f"{found.distribution} {found.version} in {found.root}", remedy)


def _check_patches() -> Check:
    from vllm_echo.integration import patch_set, patching

    try:
        status = patching.read_status(patching.find_installation(), patch_set.load_patch_set())
    except EchoPatchError as error:
        return Check("patches", False, "unreadable", str(error))
    return Check("patches", status.state == patching.APPLIED, status.state, status.remedy)


def _check_serving() -> list[Check]:
    from vllm_echo.integration import probe

    try:
        serving = probe.probe_serving()
    except ImportError as error:
        return [
            Check("platform", False, f"vLLM cannot be imported ({error})", "run scripts/install.sh")
        ]
    detail = f"{serving.platform}, {serving.architecture}"
    if serving.problem:
        return [Check("platform", False, detail, serving.problem)]
    return [
        Check("platform", True, detail),
        Check("runner", True, f"{serving.runner} in {serving.worker}"),
        Check("attention", True, serving.attention),
    ]


def _check_demo(demo_dir: Path | None) -> list[Check]:
    """The demo is a convenience: without it echo serves other models all the same."""
    from vllm_echo.cli import demo
    from vllm_echo.demo.convert import is_complete

    checks = []
    try:
        demo.check_head_files()
        checks.append(Check("demo_head", True, str(demo.HEAD_DIR), required=False))
    except EchoError as error:
        checks.append(Check("demo_head", False, "missing", str(error), required=False))
    model = (demo_dir or demo.default_dir()).expanduser() / demo.MODEL_NAME
    complete = is_complete(model)
    detail = str(model) if complete else f"not in {model.parent}"
    remedy = "" if complete else "run `vllm-echo demo`"
    checks.append(Check("demo_model", complete, detail, remedy, required=False))
    return checks
