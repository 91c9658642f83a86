"""Networks, losses, augmentation, sliding-window inference and scores."""
