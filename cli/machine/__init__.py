"""Commands about this machine alone: the running `pomona up`, and the weights in its state folder."""
