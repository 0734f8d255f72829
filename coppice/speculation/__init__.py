"""Speculative decoding without a model: trees, sampling, acceptance, routing."""
