"""Many trainings at once: a space of configs is searched for the one that scores best."""
