"""Packed tree attention over any Hugging Face causal LM: the engine of the verifier and of the `lm` head."""
