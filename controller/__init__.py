"""The in-cluster controller: reconcilers, queue, and the shell that runs them."""
