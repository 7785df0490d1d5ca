"""Compile the CPU kernels: ``python -m headrace.engine.kernels.cpu.build``, and part of the package's installation.

Standard library only, and nothing of Headrace: the build hook runs this file before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "source"
LIBRARY = HERE / "headrace_cpu.so"

# No contraction of a * b + c: the compiler would fuse it in one copy of a loop and not in another, and results would
# depend on how many rows were computed together.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra")
# gcc 12 warns about its own header's undefined registers.
AVX512_FLAGS = (
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16", "-mfma",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
# A file compiled without its flags offers no kernels, so an older compiler still gives a library.
X86_FLAGS = {"isa_avx512": AVX512_FLAGS, "isa_avx2": ("-mavx2", "-mfma", "-mf16c")}
DEADLINE_S = 300.0
SANITIZERS = ("address", "thread")


class BuildError(Exception):
    """No library could be made; the text says why in a few lines."""


def find_compiler() -> str | None:
    """The C++ compiler's path: what CXX names, or the first usual name on the PATH."""
    names = [*shlex.split(os.environ.get("CXX", ""))[:1], "g++", "c++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(target: Path = LIBRARY, *, sanitize: str = "", program: Path | None = None) -> Path:
    """Compile all sources and put the library at `target`, whole or not at all; BuildError when that fails.

    For tests, `sanitize` compiles in one of SANITIZERS (a process that loads such a library must have preloaded its
    runtime), and `program` is a source with a `main`: the target is then a program that uses the kernels.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found (looked at CXX, g++, c++ and clang++)")
    extra = (f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1") if sanitize else ()
    with tempfile.TemporaryDirectory(prefix="headrace-build-") as folder:
        objects = _compile_all(compiler, Path(folder), extra, () if program is None else (program,))
        linked = Path(folder) / "linked"
        kind = ("-shared",) if program is None else ()
        _run([compiler, *kind, "-pthread", *extra, *map(str, objects), "-o", str(linked)])
        target.parent.mkdir(parents=True, exist_ok=True)
        # Copied beside the target first: a running engine keeps the file that it has mapped.
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(linked, beside)
        os.replace(beside, target)
    return target


def _compile_all(compiler: str, folder: Path, extra: Sequence[str], more: Sequence[Path]) -> list[Path]:
    sources = [*sorted(SOURCES.glob("*.cpp")), *more]
    objects = [folder / f"{source.stem}.o" for source in sources]
    waiting = list(zip(sources, objects, strict=True))
    running: list[tuple[subprocess.Popen[str], Path]] = []
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            source, output = waiting.pop(0)
            command = [compiler, *FLAGS, *_isa_flags(compiler, source.stem), f"-I{SOURCES}", *extra]
            running.append((_start([*command, "-c", str(source), "-o", str(output)]), source))
        process, source = running.pop(0)
        _finish(process, source.name)
    return objects


def _isa_flags(compiler: str, stem: str) -> Sequence[str]:
    flags = X86_FLAGS.get(stem, ())
    if not flags or platform.machine() not in ("x86_64", "AMD64"):
        return ()
    probe = subprocess.run(
        [compiler, *flags, "-x", "c++", "-fsyntax-only", "-"], input="", text=True, capture_output=True, timeout=60
    )
    return flags if probe.returncode == 0 else ()


def _run(command: Sequence[str]) -> None:
    _finish(_start(command), "the library")


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process: subprocess.Popen[str], what: str) -> None:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BuildError(f"compiling {what} took more than {DEADLINE_S:.0f} s") from None
    if process.returncode != 0:
        raise BuildError(f"compiling {what} failed:\n" + "\n".join(output.splitlines()[:20]))


def main() -> int:
    """Build; 1 and one message when that is not possible."""
    parser = argparse.ArgumentParser(description="Compile Headrace's CPU kernels.")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="where to put the library")
    parser.add_argument("--sanitize", choices=SANITIZERS, default="", help="with a sanitizer, for tests")
    options = parser.parse_args()
    try:
        print(f"built {build(options.output, sanitize=options.sanitize)} for {sysconfig.get_platform()}")
    except BuildError as error:
        print(f"the CPU kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
