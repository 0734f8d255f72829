"""Redis: connections, scripts that run in it, and the registry of replicas."""
