"""One package for each deployable; they never import each other, but for what puts two into one process."""
