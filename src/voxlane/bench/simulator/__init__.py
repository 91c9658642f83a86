"""A simulator of loading at scale: from the settings of a loader, a network and a bucket to what an epoch takes."""
