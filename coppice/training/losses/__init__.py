"""Losses of targets and heads, and the masks that they are computed under."""
