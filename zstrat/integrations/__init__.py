"""zstrat in the hands of other libraries: a module for each, imported by its name."""
