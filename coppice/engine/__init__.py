"""Packed tree attention over Hugging Face causal LMs: the engine of the verifier and of the `lm` head."""

import os

# Read by torch when it allocates for the first time: on Linux tensors from 2 MiB on ask for huge pages.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
