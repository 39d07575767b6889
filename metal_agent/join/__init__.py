"""The way of a host into a cluster and out of it: an invitation, the exchange of its code, the removal."""
