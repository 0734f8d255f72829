"""Redis: connections, and scripts that run in it."""
