"""The agent's exchange with the API server: address, tokens, host and process status, EndpointSlices and Events."""
