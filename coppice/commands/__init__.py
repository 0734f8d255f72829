"""Commands that are neither services nor measurements: demo, doctor, convert, and the picture of a tree."""
