"""Commands that are neither services nor measurements: demo, doctor, and the picture of a tree."""
