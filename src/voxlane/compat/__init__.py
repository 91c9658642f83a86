"""Other connectors' names, over voxlane's own classes."""
