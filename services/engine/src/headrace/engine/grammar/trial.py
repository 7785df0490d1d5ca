"""Compiling a schema that could explode, first in a process that may die of it.

The library counts its work, but not all of it: intersecting thirty patterns takes minutes, forty large `multipleOf`
gigabytes, and neither a thread nor its memory can be taken back. What passes here takes as long again in the worker.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec
from headrace.engine.grammar.verdict import Refused

# What becomes a regular expression inside a schema. This many are harmless however they are combined: 2 ms.
_REGULAR = ('"pattern', '"format"')
_MOST_REGULAR = 8
_ESCAPED_LETTER = re.compile(r"\\u00[4-7]")  # nobody needs one but to hide a keyword
_START_LIMIT_S = 60.0  # of a process that reads a vocabulary, on a busy machine
_MEMORY_BYTES = 2 << 30  # address space: a vocabulary takes 0.5 GB of it
_PR_SET_PDEATHSIG = 1


def needs_trial(spec: ConstraintSpec) -> bool:
    """Whether compiling could explode: by the text alone, so that the step loop may ask."""
    if spec.kind is not ConstraintKind.JSON_SCHEMA:
        return False
    (text,) = spec.texts
    many = sum(map(text.count, _REGULAR)) > _MOST_REGULAR
    return many or '"multipleOf"' in text or _ESCAPED_LETTER.search(text) is not None


class Trial:
    """The process, started when it is first needed and again after it had to be killed. For one thread at a time."""

    def __init__(self, model: Path, vocab_size: int, eos_ids: frozenset[int], *, limit_s: float) -> None:
        self._arguments = [str(model), str(vocab_size), ",".join(map(str, sorted(eos_ids)))]
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[ConstraintSpec, str] | None = None

    def check(self, spec: ConstraintSpec) -> None:
        """Refused when `spec` cannot be compiled, or not within the limits of time and memory."""
        connection = self._connection or self._start()
        try:
            connection.send(spec)
            if not connection.poll(self._limit_s):
                self._end()
                raise Refused(f"takes more than {self._limit_s:g} s to compile")
            reason = connection.recv()
        except (EOFError, ConnectionError):
            self._end()
            raise Refused("takes too much memory to compile") from None
        if reason:
            raise Refused(reason)

    def kill(self) -> None:
        """End the process, whatever it does; any thread may."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _end(self) -> None:
        self.kill()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> Connection[ConstraintSpec, str]:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._arguments]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
        self._connection = ours
        if not ours.poll(_START_LIMIT_S):
            self._end()
            raise TimeoutError("the process for trials did not start")
        ours.recv()
        return ours


def main(fd: str, model: str, vocab_size: str, eos_ids: str) -> None:
    """Compile what comes in, and send back why it cannot be compiled, or an empty text."""
    from headrace.engine.grammar.compiler import compile_grammar
    from headrace.engine.grammar.vocabulary import load_vocabulary

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(10)  # the step loop comes first
    connection: Connection[str, ConstraintSpec] = Connection(int(fd))
    vocabulary = load_vocabulary(Path(model), int(vocab_size), frozenset(map(int, eos_ids.split(","))))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    connection.send("")
    while True:
        try:
            spec = connection.recv()
        except EOFError:
            return
        try:
            compile_grammar(spec, vocabulary)
            connection.send("")
        except Refused as refused:
            connection.send(str(refused))


if __name__ == "__main__":
    main(*sys.argv[1:])
