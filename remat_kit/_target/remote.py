"""Compiling in a process of its own: for chips that are not there, without touching this process.

libtpu reads its environment when it loads and holds a lock, the CUDA plugin writes to standard error and looks for
devices, and either may crash. One worker per platform (`worker.py`) is started when first needed and kept; one that
dies or takes too long is an error here, and the next compile starts another.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from remat_kit._errors import RematError

_ENVIRONMENT = {
    "tpu": {
        # No metadata server is asked what machine this is, two processes may hold libtpu, logs stay off.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    },
    # Real GPUs stay out of it: others may be using them.
    "cuda": {"CUDA_VISIBLE_DEVICES": "", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}


class CompilerError(Exception):
    """What the compiler itself says of a program."""


class Worker:
    """A process that compiles for one platform."""

    def __init__(self, platform: str):
        if not sys.executable:
            raise RematError("cannot start a compiler process: this Python does not know its own executable.")
        self.platform = platform
        self._stderr = tempfile.TemporaryFile()
        ours, theirs = Pipe()
        self._connection: Connection = ours
        # -P: the folder of the script holds modules with names of their own.
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(theirs.fileno())]
        environment = os.environ | _ENVIRONMENT[platform] | {"JAX_PLATFORMS": "cpu"}
        environment["REMAT_KIT_PATH"] = os.pathsep.join(filter(None, sys.path))
        self.flags = flags()
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C is for this process; it ends the worker itself
            )
        except (OSError, ValueError) as e:
            raise RematError(f"cannot start a compiler process with {sys.executable}: {e}") from e
        theirs.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: dict[str, Any], bytecode: bytes, timeout: float) -> tuple[dict[str, Any], str]:
        """Compiles one program.

        Args:
          timeout: seconds to wait; the worker is ended after them.

        Raises:
          CompilerError: what the compiler says of the program.
          RematError: if the worker dies or takes too long.
        """
        start = time.monotonic()
        late = threading.Event()

        def end() -> None:
            late.set()
            self.process.kill()  # whatever it is waited for then comes to an end

        timer = threading.Timer(timeout, end)
        timer.daemon = True
        timer.start()
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            self._connection.send_bytes(bytecode)
            reply, text = json.loads(self._connection.recv_bytes()), self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            if not late.is_set():
                raise RematError(self._epitaph(time.monotonic() - start)) from None
            self.close()
            raise RematError(
                f"the {self.platform} compiler took longer than {timeout:g} s and was ended. Allow it more with "
                "timeout=, or compile a smaller program (fewer layers, a scan over layers)."
            ) from None
        except BaseException:  # interrupted: what the worker answers later would answer another question
            self.close()
            raise
        finally:
            timer.cancel()
        if "error" in reply:
            raise CompilerError(reply["error"])
        return reply, text

    def _epitaph(self, seconds: float) -> str:
        """Why the worker died, as far as it can be told."""
        try:
            status = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            status = "unknown"
        self._stderr.seek(0)
        lines = [s for s in self._stderr.read()[-20000:].decode(errors="replace").splitlines() if s.strip()]
        said = " It wrote last: " + " | ".join(lines[-3:])[-600:] if lines else ""
        self.close()
        if status == -9:
            how = "was killed (signal 9), as systems do to a process that takes too much memory"
        elif isinstance(status, int) and status < 0:
            how = f"crashed (signal {-status})"
        else:
            how = f"ended (status {status})"
        return (
            f"the {self.platform} compiler's process {how} after {seconds:.0f} s.{said} Nothing else is harmed: the "
            "next compile starts another."
        )

    def close(self) -> None:
        """Ends the process."""
        if self.alive:
            self.process.kill()
            self.process.wait()
        self._connection.close()
        self._stderr.close()


_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def flags() -> tuple[str, ...]:
    """What the environment tells the compilers."""
    return tuple(os.environ.get(name, "") for name in _FLAGS)


_workers: dict[str, Worker] = {}
_locks: dict[str, threading.Lock] = {}


def _start_anew() -> None:
    """Forgets all workers: a forked child has no right to its parent's, nor do its locks ever open."""
    _workers.clear()
    _locks.update({platform: threading.Lock() for platform in _ENVIRONMENT})


_start_anew()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def compile_remotely(
    platform: str, request: dict[str, Any], bytecode: bytes, timeout: float
) -> tuple[dict[str, Any], str]:
    """Compiles a lowered program in the worker of a platform.

    Args:
      request: ``topology``, ``topology_options`` and ``options`` as `worker.py` reads them.
      bytecode: the lowered module, MLIR bytecode.
      timeout: seconds.

    Returns:
      XLA's figures, and the text of the optimized module.

    Raises:
      CompilerError: what the compiler says of the program.
      RematError: if the worker dies or takes too long.
    """
    with _locks[platform]:
        worker = _workers.get(platform)
        if worker is not None and not (worker.alive and worker.flags == flags()):  # it reads them when it starts
            worker.close()
            worker = None
        if worker is None:
            worker = _workers[platform] = Worker(platform)
        return worker.ask({"platform": platform, **request}, bytecode, timeout)


@atexit.register
def _close_all() -> None:
    for worker in list(_workers.values()):
        worker.close()
