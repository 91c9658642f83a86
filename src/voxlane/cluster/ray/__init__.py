"""Train runs on a Ray cluster."""
