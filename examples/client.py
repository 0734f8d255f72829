"""Stream an answer with the SDK: `python examples/client.py "Once upon a time"`."""

import sys

from coppice import Chunk, Client

with Client() as client:  # of the server at COPPICE_ADDRESS, or of `coppice up`
    for event in client.stream(sys.argv[1], temperature=0.8, seed=3, max_new_tokens=64):
        if isinstance(event, Chunk):
            print(event.text, end="", flush=True)
print(f"\n{event.new_tokens} tokens in {event.steps} steps")
