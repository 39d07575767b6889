"""`pomona endpoint`: how programs reach the gateway of the cluster."""
