"""Servers that benchmarks measure against: stand-ins of engines that cost nothing, and a minimal proxy as a floor."""
