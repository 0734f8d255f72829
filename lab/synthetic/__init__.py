"""`coppice bench synthetic`: step costs of large targets from their shapes alone, with random weights."""
