"""The numpy device: slow, obvious, and the oracle of the conformance kit."""
