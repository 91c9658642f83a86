"""Train on a growing number of workers and report the efficiency."""
