"""The only door to the API server: client, watch, store, queue, apply, lease, events."""
