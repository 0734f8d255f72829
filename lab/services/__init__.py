"""What the sleeping target and head agree on, in a folder as a target's: a made-up text, its vocabulary, the times."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Asleep:
    """The shape of what is handed out, that of an 8B target, and for how long forwards sleep."""

    t_m_ms: float
    t_d_ms: float
    vocab_size: int = 152_000
    hidden_size: int = 4096
    layers: int = 32

    def next(self, token: Any, position: Any) -> Any:
        """The token behind `token`, which stands at an absolute position; numbers, or tensors of them."""
        return (48_271 * token + 69_621 * position + 11) % self.vocab_size

    def text(self, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The next `count` tokens behind some ids."""
        made = [ids[-1]]
        for position in range(len(ids) - 1, len(ids) - 1 + count):
            made.append(self.next(made[-1], position))
        return tuple(made[1:])

    def write(self, folder: Path) -> None:
        """Make a folder a target's, with a tokenizer: an orchestrator makes text of ids."""
        from tokenizers import Tokenizer, decoders, models

        config = {"model_type": "asleep", **asdict(self)}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        words = {f"Ġ{number}": number for number in range(self.vocab_size)}  # the sign is a space's
        tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """What `write` wrote."""
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


def sleep_out(began_ns: int, milliseconds: float) -> int:
    """Sleep, without the interpreter's lock, until so long after `began_ns`; returns how long it was, nanoseconds.

    That is about 0.08 ms more than was asked for: the kernel wakes a sleeper late. Where other threads of the process
    are busy it is more, for the lock is waited for, as it is behind a forward of a GPU.
    """
    left_ns = began_ns + int(milliseconds * 1e6) - time.perf_counter_ns()
    time.sleep(max(0, left_ns) / 1e9)
    return time.perf_counter_ns() - began_ns
