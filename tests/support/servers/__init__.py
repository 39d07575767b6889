"""Servers of others that weights are fetched from in tests, as real programs: an S3 gateway, a container registry."""
