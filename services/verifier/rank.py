"""python -m services.verifier.rank: a further rank of a verifier's target; the verifier starts it."""

from __future__ import annotations

import os
import sys

from coppice.config.settings import Settings
from coppice.rpc.server import run_service


async def serve(settings: Settings) -> int:
    """Do what rank 0 does until it ends; returns the exit code."""
    from .devices import check_devices  # torch comes with it, settings are checked before
    from .ranks import follow, join, load

    rank = int(os.environ["RANK"])
    check_devices(settings.verifier, rank)
    join(settings.verifier, rank, int(os.environ["MASTER_PORT"]))
    follow(load(settings.verifier))
    return 0


if __name__ == "__main__":
    sys.exit(run_service(serve))
