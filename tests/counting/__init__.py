"""How many of the project's own functions a step calls, in each process of a real stack."""
