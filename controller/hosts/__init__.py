"""MetalHosts: their liveness and the Secret that each may read."""
