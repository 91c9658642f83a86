"""A training app on Kubernetes: its folder, its image, its manifests, its life in a cluster."""
