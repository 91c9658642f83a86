"""Launchers, which start the ranks of a run: on Ray, under SLURM, on Kubernetes.

To add a launcher, write a package here that starts `voxlane COMMAND` on its machines, and let `commands` say which
arguments the command gets there. Every rank ends in `voxlane.train.fit`.
"""
