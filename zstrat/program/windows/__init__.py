"""Windows: several local steps on a worker's own copy of the variables, run as one
closure."""
