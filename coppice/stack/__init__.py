"""A stack of services on one machine: what it consists of, and its processes."""
