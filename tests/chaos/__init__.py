"""A seeded run that breaks hosts and API server at random while clients send requests: `make chaos`."""
