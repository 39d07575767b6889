"""The module `sglang` of a container, played by the stand-in."""
