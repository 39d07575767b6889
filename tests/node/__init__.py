"""Pomona on nodes with a real kubelet: `make test-node`."""
