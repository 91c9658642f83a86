"""Time one training step, implemented in several ways, on one device."""
