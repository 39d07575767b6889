"""The places that weights come from: one module for each scheme, behind one seam, and the requests they share."""
