"""Training a small target of our own from text: `coppice train target`."""
