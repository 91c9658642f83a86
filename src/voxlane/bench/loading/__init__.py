"""Load data as training does, with a sleep in place of the training step."""
