"""`python -m lab.services.verifier`: services.verifier, with a target that sleeps instead of computing."""

import importlib
import runpy
import time
from typing import Any

import torch
from torch import Tensor

from coppice.config.sections import VerifierSettings
from coppice.engine.engine import DTYPES, Clock, Context, Engine, EngineInfo, ForwardOutput, default_feature_layers
from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.rows import PackedBatch
from coppice.limits import HASH_BYTES
from coppice.stack.process import module_of
from lab.services import Asleep, sleep_out


class SleepingEngine(Engine):
    """A target whose forward sleeps, and hands out the made-up text as logits, (R, V) of one id a row, and zeros.

    What an Engine computes on the CPU beside its model, what its rows see, and what a GPU computes of logits, the
    draws, belong to the time slept. A pool of one number a token stands for the KV.
    """

    def __init__(self, asleep: Asleep, dtype: str, kv_tokens: int) -> None:
        self.asleep, kind = asleep, DTYPES[dtype]
        self.pool = KVPool(layers=[KVShape(1, 1, 1)], tokens=kv_tokens, dtype=kind)
        self.info = EngineInfo(
            vocab_size=asleep.vocab_size,
            context=Context(kv_tokens),
            layers=asleep.layers,
            hidden_size=asleep.hidden_size,
            eos_ids=(),
            dtype=dtype,
            feature_layers=default_feature_layers(asleep.layers),
            weights_hash=bytes(HASH_BYTES),
        )
        self._zeros = torch.zeros(1, dtype=kind)

    @property
    def on_device(self) -> bool:
        return True

    def forward(self, batch: PackedBatch) -> ForwardOutput:
        clock = Clock(self.pool.device)
        return ForwardOutput(*clock(self._sleep, batch), clock)

    def _sleep(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        began_ns, kept = time.perf_counter_ns(), batch.logits_to_keep
        ids = self.asleep.next(batch.tokens[kept], batch.positions[kept])
        width = len(batch.feature_layers) * self.asleep.hidden_size
        features = self._zeros.expand(len(batch.tokens), width) if width else None
        sleep_out(began_ns, self.asleep.t_m_ms)
        return ids[:, None].expand(-1, self.asleep.vocab_size), features


def load_engine(settings: VerifierSettings) -> Engine:
    return SleepingEngine(Asleep.read(settings.target), settings.dtype, settings.kv_tokens)


def draw_jobs(jobs: object, logits: Tensor) -> list[int]:
    """(R,) ids, the same at every temperature."""
    ids: list[int] = logits[:, 0].tolist()
    return ids


if __name__ == "__main__":
    worker: Any = importlib.import_module(module_of("services.verifier.worker"))
    worker.load, worker.check_devices, worker.draw_jobs = load_engine, lambda settings, sessions: settings, draw_jobs
    runpy.run_module(module_of("services.verifier"), run_name="__main__", alter_sys=True)
