"""InferenceServices: replicas in pods and on hosts, readiness and status."""
