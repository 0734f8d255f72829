"""The policy `auto`: which heads to ask and how many nodes to verify, by what a second brings."""
