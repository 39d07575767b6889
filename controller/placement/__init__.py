"""Placement: which host runs a MetalProcess."""
