"""Measured speeds: their source for services, and the Jobs that measure what is unknown."""
