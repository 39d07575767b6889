"""The resources as typed structs, and the CRD YAML generated from them.

The structs are the one definition: the controller, the agent and the schema that the API server enforces all
come from them, so they cannot disagree.
"""
