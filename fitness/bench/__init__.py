"""The measurement of an engine behind an OpenAI-compatible endpoint."""
