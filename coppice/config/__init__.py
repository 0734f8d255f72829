"""Settings of every process: flag, then COPPICE_SECTION__NAME, then YAML, then default."""
