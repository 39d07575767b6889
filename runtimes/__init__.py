"""Inference engines, one module each, for pods and host processes alike."""
