"""Draft heads: what proposes trees, from counting text to blocks of tokens in one forward."""
