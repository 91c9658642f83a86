"""Run voxlane commands as SLURM jobs."""
