"""The verifier: holds the target and its KV cache, and checks whole trees in one forward."""
