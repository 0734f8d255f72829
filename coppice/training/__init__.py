"""Training: corpora, a target of our own, and draft models that are taught by a target."""
