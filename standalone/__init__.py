"""One machine without a cluster: the controller's decisions and the agent's supervisor over YAML from files."""
