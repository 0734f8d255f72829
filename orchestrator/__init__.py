"""The orchestrator: samples roots, asks heads for trees, has them verified, commits, streams text to clients."""
