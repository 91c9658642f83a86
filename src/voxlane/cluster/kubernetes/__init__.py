"""Talking to Kubernetes: one API client, its errors in our words, manifests checked before they are sent."""
