"""The other ranks of a target that several devices share: processes that do, step by step, what this one does.

Rank 0 is the verifier itself: it alone decides. Before a forward it broadcasts what the others need to do the same,
which is the rows, where they lie, and the slots that were moved in the KV since the forward before. If a rank exits,
all exit: one left alone would wait in its next collective.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NoReturn

import numpy as np
import structlog
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from coppice.config.model import fit_verifier
from coppice.config.sections import VerifierSettings
from coppice.config.settings import Settings
from coppice.engine.engine import Engine
from coppice.engine.loading import load_engine
from coppice.engine.rows import PackedBatch
from coppice.errors import InvalidField
from coppice.rpc.server import run_service
from coppice.stack.process import REFUSED, as_flags, await_end, environment, spawn

log = structlog.get_logger()

HOST = "127.0.0.1"
SHARED = ("target", "device", "dtype", "threads", "kv_tokens", "ranks", "invariant")  # settings that other ranks need
_PATIENCE = timedelta(days=365)  # a rank waits for the next forward for as long as nobody asks
_STOP_S, _LAST_WORDS_S = 5.0, 3.0

Forward = tuple[PackedBatch, list[NDArray[np.int64]]]
"""a forward, and the slots (2, n) that the pool moved before it, in their order"""


def share(forward: Forward | None = None) -> Forward:
    """Send a forward to all other ranks, from rank 0, or receive it there."""
    sent: list[Any] = [forward]
    dist.broadcast_object_list(sent, device=torch.device("cpu"))
    meant: Forward = sent[0]
    return meant


class Ranks:
    """Ranks 1 to N - 1, started by rank 0, the process and thread that holds this; they end with it."""

    def __init__(self, settings: VerifierSettings) -> None:
        """Start them; all load at once. Raises what `load_engine` does."""
        self._stopping = False
        listener = socket.create_server((HOST, 0))  # of the host alone: whoever reaches it could be a rank
        port = listener.getsockname()[1]
        flags = as_flags({f"verifier.{name}": value for name, value in settings if name in SHARED})
        self._processes = []
        for rank in range(1, settings.ranks):
            variables = environment() | {"MASTER_PORT": str(port), "RANK": str(rank)}
            process = spawn(f"{__package__}.ranks", flags, None, variables)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        join(settings, 0, port, listener)
        try:
            self.engine = load(settings)
        except BaseException:
            for process in self._processes:  # where one of them failed it says why, and all end
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_WORDS_S / len(self._processes))
            raise
        self.engine.pool.moves, self.engine.tell = [], self._tell

    def _tell(self, batch: PackedBatch) -> None:
        pool = self.engine.pool
        moves, pool.moves = pool.moves or [], []
        share((batch, moves))

    def stop(self) -> None:
        self._stopping = True
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            await_end(process, _STOP_S)

    def fail(self, reason: str) -> NoReturn:
        """End this process at once, and with it all others."""
        log.error("the ranks of the target end together", why=reason)
        os._exit(1)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code == REFUSED:  # its last line says why
            os._exit(REFUSED)
        if not self._stopping:
            self.fail(f"rank {rank} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")


def join(settings: VerifierSettings, rank: int, port: int, listener: socket.socket | None = None) -> None:
    """Be a rank, on CUDA with the device of its number. `listener`: rank 0's, at whose port the ranks meet."""
    if settings.threads:
        torch.set_num_threads(max(1, settings.threads // settings.ranks))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    meeting: dict[str, Any] = {"is_master": rank == 0, "master_listen_fd": listener.detach() if listener else None}
    store = dist.TCPStore(HOST, port, settings.ranks, wait_for_workers=False, **meeting)  # type: ignore[attr-defined]
    # Forwards are broadcast from the host, so that gloo is needed on CUDA too.
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=settings.ranks, timeout=_PATIENCE)


def load(settings: VerifierSettings) -> Engine:
    """A rank's engine; all ranks load at once. Raises what `load_engine` does."""
    options = settings.model_dump(include={"device", "dtype", "kv_tokens", "ranks", "invariant"})
    return load_engine(settings.target, **options)


def follow(engine: Engine) -> None:
    """Do what rank 0 does until it ends."""
    while True:
        try:
            batch, moves = share()
        except RuntimeError:  # its connection closed
            return
        for slots in moves:
            engine.pool.move(slots)
        engine.forward(batch)


def check_devices(settings: VerifierSettings, rank: int = 0, sessions: int = 0) -> VerifierSettings:
    """The settings with the KV tokens that there is room for beside the states of so many sessions. Raises InvalidField
    unless there are the devices that the target's ranks need, and this rank's has the memory.
    """
    device, ranks, room, devices, reason = settings.device, settings.ranks, None, torch.cuda.device_count(), ""
    if ranks > 1 and find_spec("accelerate") is None:
        reason = "need the package accelerate, which is not installed: in a checkout pip install '.[ranks]'"
    elif ranks > 1 and device == "cuda" and devices < ranks:
        reason = f"take a CUDA device each, and torch finds {devices}"
    elif ranks > 1 and device == "cpu" and devices:
        reason = "would compute on the CUDA devices here: verifier.device cuda, or CUDA_VISIBLE_DEVICES= hides them"
    if reason:
        raise InvalidField("verifier.ranks", f"{ranks} ranks {reason}")
    if device.startswith("cuda"):  # of no other device: to ask for its memory takes some of it
        room = float(torch.cuda.mem_get_info((torch.device(device).index or 0) + rank)[0])
    return settings.model_copy(update={"kv_tokens": fit_verifier(settings, sessions, room)})


async def serve(settings: Settings) -> int:
    rank = int(os.environ["RANK"])
    check_devices(settings.verifier, rank)
    join(settings.verifier, rank, int(os.environ["MASTER_PORT"]))
    follow(load(settings.verifier))
    return 0


if __name__ == "__main__":
    sys.exit(run_service(serve))
