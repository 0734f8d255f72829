"""Packed tree attention over Hugging Face causal LMs: the engine of the verifier and of the `lm` head."""
