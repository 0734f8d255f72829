"""Redis: connections, with scripts that run in it, and the registry of replicas."""
