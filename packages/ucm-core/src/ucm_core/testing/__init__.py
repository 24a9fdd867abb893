"""Conformance suites that a store, or a package with its own medium, subclasses in its tests."""
