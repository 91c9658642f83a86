"""Training, evaluation, prediction and their report."""
