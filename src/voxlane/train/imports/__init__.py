"""Models that other programs trained, as exported models of voxlane."""
