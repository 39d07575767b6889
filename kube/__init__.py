"""All access to the API server: client, watch, store, queue, apply, lease, events, credentials."""
