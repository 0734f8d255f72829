"""What services say to one another, as plain values; coppice/wire reads and writes them."""
