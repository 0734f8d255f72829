"""The networks of the draft heads."""
