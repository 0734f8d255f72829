"""OpenAI's API over HTTP, in the orchestrator's own process and event loop."""
