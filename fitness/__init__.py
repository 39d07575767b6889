"""Memory estimates of models, by engine."""
