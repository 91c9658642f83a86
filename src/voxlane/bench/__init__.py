"""Benchmarks that users run on their own machines and buckets: `voxlane bench`."""
