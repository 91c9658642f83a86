"""How the ranks of a run come to be: on Ray, under SLURM."""
