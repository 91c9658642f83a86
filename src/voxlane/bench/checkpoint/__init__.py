"""Save and load checkpoints of a demo model, by several strategies in turn."""
