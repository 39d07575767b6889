"""`pomona host`: the hosts of a cluster, as its administrator sees them."""
