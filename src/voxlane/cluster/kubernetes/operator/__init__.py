"""The operator that keeps StagedDatasets on nodes' disks."""
