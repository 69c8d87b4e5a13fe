"""Windows: several steps on a worker's own copy of the variables, as one closure."""
