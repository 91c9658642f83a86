"""The `voxlane` command."""
