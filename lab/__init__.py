"""Measuring: what is compared, how it is judged, and how it is reported."""
