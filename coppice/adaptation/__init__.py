"""Online adaptation of draft heads: what they miss, what they learn from it, and how new weights reach them."""
