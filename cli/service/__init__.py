"""Commands about the services of a cluster: `pomona deploy`, `list`, `status`, `logs`, `chat`, `delete`, `catalog`."""
