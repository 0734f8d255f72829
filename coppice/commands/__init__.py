"""Commands that are neither services nor measurements: demo, doctor, size, convert, and the picture of a tree."""
