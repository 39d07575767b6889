"""`pomona key`: keys with which clients ask services through the gateway of the cluster."""
