"""Tests that packages inherit for what they add (docs/extend.md)."""

from coppice.testing.head_contract import HeadContract

__all__ = ["HeadContract"]
