"""The preflight webhook, if it is on: it refuses an InferenceService that no device class of the cluster can run."""
