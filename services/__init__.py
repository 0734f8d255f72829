"""One package for each deployable; they never import each other."""
