"""Runs a module as a child that ends with its parent: `python -m coppice.stack.child MODULE ARGUMENTS...`, or a fork.

The parent holds the other end of this process's standard input; when it ends, however it ends, the pipe closes and the
child stops as on SIGTERM. Linux' PR_SET_PDEATHSIG is not used: it fires when the *thread* that started the child ends.
"""

import ctypes
import gc
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

ORPHAN_GRACE_S = 10.0
OPENMP_SPINS = "50000"
"""turns that an OpenMP thread waits for work before it sleeps (libgomp's GOMP_SPINCOUNT): enough for the gaps of a
forward. libgomp's own 300,000 go on for up to 16 ms and take a core from whoever has the next part of a step"""


def _stop_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def main() -> None:
    """Watch the parent, be the module, and end the process at once when the module has ended by its exit code: to take
    down an interpreter that holds torch and a model costs a second of a core.
    """
    threading.Thread(target=_stop_with_parent, name="parent-watch", daemon=True).start()
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    module, sys.argv = sys.argv[1], sys.argv[1:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int):  # nothing, or why it failed
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)


def become(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], stdin: Connection) -> None:
    """Turn a fork of the fork server into what `python -m coppice.stack.child` would be with this environment."""
    gc.freeze()  # a collection would touch, and so copy, every page that is shared with the server
    os.setpgrp()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.dup2(stdin.fileno(), 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.argv = [__name__, module, *arguments]
    # `ps` shows the command, as far as it fits into the place of the fork server's.
    command = "\0".join([sys.executable, "-m", *sys.argv]).encode()
    start, end = map(int, Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, command[: end - start - 1].ljust(end - start, b"\0"), end - start)
    main()


if __name__ == "__main__":
    main()
