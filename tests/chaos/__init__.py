"""A seeded run that breaks hosts at random while clients send requests: `make chaos`."""
