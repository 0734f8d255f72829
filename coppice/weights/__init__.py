"""A head's weights: their versions, how they are sent, staged and kept."""
