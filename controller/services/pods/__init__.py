"""The replicas of a service in pods: the Deployment, its template and rollout, and the objects beside its pods."""
