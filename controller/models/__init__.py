"""Models: inspected, fetched onto a volume, and combined with their companions."""
