"""Commands about the hosts outside of a cluster: `pomona host`."""
