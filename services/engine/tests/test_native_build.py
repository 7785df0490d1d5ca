"""How the native kernels are compiled, and what the compiler's sanitizers say of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.kernels.cpu.build import BuildError, build, find_compiler
from headrace.engine.kernels.cpu.library import LIBRARY_VARIABLE, Unavailable, load_library


def test_a_library_that_is_not_there_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(Unavailable, match=r"python -m headrace\.engine\.kernels\.cpu\.build"):
        load_library()


def test_without_a_compiler_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()


@pytest.mark.timeout(600)
def test_the_kernels_stay_within_their_memory(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=60)
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler} has no AddressSanitizer")
    library = build(tmp_path / "sanitized.so", sanitize="address")
    tests = [str(Path(__file__).with_name(f"test_native_{part}.py")) for part in ("kernels", "model")]
    checked = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        env={**os.environ, LIBRARY_VARIABLE: str(library), "LD_PRELOAD": runtime.stdout.strip(),
             "ASAN_OPTIONS": "detect_leaks=0", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=500, cwd=tmp_path,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout[-4000:] + checked.stderr[-4000:]


@pytest.mark.timeout(600)
def test_threads_share_nothing_but_what_the_pool_hands_them(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    runtime = subprocess.run([compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, timeout=60)
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler} has no ThreadSanitizer")
    program = build(tmp_path / "steps", sanitize="thread", program=Path(__file__).with_name("native_steps.cpp"))
    # Its shadow memory has fixed addresses, which a randomised layout may take.
    fixed = ["setarch", "--addr-no-randomize"] if shutil.which("setarch") else []
    ran = subprocess.run(
        [*fixed, str(program)], env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    if "unexpected memory mapping" in ran.stderr or "personality" in ran.stderr:
        pytest.skip(f"ThreadSanitizer does not run here: {ran.stderr.splitlines()[0]}")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    assert ran.stdout.startswith("the same")
