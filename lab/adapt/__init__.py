"""Measuring adaptation: streams of texts that change, and drafters that learn from them."""
