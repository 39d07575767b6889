"""A seeded run that breaks hosts at random while clients ask: `make chaos`."""
