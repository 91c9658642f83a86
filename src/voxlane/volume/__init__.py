"""Scans and prepared volumes: reading, checking, planning, preparing, and the stream of patches."""
