"""The adapter service: from what heads miss to new weights (SpecBlock, section 3.4)."""
