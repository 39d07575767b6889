"""The in-cluster controller: reconcilers, binder, and the shell that runs them."""
