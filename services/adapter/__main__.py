"""python -m services.adapter: train the heads of drafters while they serve."""

import os
import sys

from coppice.config.model import check_model
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.server import run_service


async def serve(settings: Settings) -> int:
    """Load the heads and adapt them, or stand by, until told to stop; returns the exit code."""
    if not settings.adaptation.redis:
        raise InvalidField("adaptation.redis", "the adapter reads from Redis; give its URL")
    if not settings.adapter.heads:
        raise InvalidField("adapter.heads", "names none")
    for head in settings.adapter.heads:
        check_model("adapter.heads", head.partition("=")[2])
    check_model("adapter.target", settings.adapter.target)
    # Batches come in hundreds of shapes, and oneDNN keeps kernels for each: 400 MiB beside a small head.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    from .service import serve as adapt  # torch comes with it

    return await adapt(settings)


if __name__ == "__main__":
    sys.exit(run_service(serve))
