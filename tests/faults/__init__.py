"""Harnesses that feed faults to the real commands; `make test-faults` runs those that take minutes."""
