"""The programs that run on each machine."""
