"""Speculative decoding without a model: trees, sampling, acceptance, routing. Only sampling_torch needs torch."""
