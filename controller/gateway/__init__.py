"""The controller's part of the cluster's gateway: keys of clients, and copies of services' tokens."""
