"""Run a program that a model wrote, in a process of its own with limits. It is a guard against accidents, not a sandbox.

Limits: seconds, memory, size of files, no network where the kernel lets it be taken away, no further processes, nothing
written outside an empty folder. What holds these is in guarded.py, in the same interpreter as the program, so a program
made to break out may: run those in a container.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SECONDS = 5.0
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
CHILD = Path(__file__).with_name("guarded.py")


class Outcome(NamedTuple):
    passed: bool
    reason: str  # passed, or what went wrong


def run_program(source: str, seconds: float = SECONDS, memory: int = MEMORY_BYTES) -> Outcome:
    """Passed if the program comes to its end without an exception, and does not end itself before.

    Args:
        source: Python, for the standard library alone. seconds: of wall-clock and of processor time. memory: bytes.
    """
    nonce = secrets.token_hex(16)  # the program does not see it: an early exit is no success
    with tempfile.TemporaryDirectory(prefix="specplug-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "program.py").write_text(source, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-S", "-B", str(CHILD), str(seconds), str(memory), str(FILE_BYTES)]
        with subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": "", "HOME": folder, "LC_ALL": "C.UTF-8"},
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(nonce.encode())
                child.stdin.close()
                child.wait(seconds + 1)
            except subprocess.TimeoutExpired:
                pass
            finally:
                late = child.poll() is None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            said = os.read(child.stdout.fileno(), 4096).decode(errors="replace")
    if late or child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, f"stopped after {seconds:g} seconds")
    if said.startswith(nonce):
        reason = said.removeprefix(nonce)
        return Outcome(reason == "passed", reason)
    return Outcome(
        False, "ended itself before its tests did" if child.returncode >= 0 else f"signal {-child.returncode}"
    )
