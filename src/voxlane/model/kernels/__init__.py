"""Kernels for GPUs, in Triton, and where they can be used. Needs torch alone; without Triton, or on a device that it
does not know, callers take PyTorch's own operations."""
