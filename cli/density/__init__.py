"""`pomona fit`, `pomona simulate` and `pomona cost`: what fits where, how fast, and at what cost."""
