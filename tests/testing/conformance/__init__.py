"""Conformance of object-store servers, shown by clients that other projects wrote.

``registry`` holds the servers, the clients and the operations; each other module adds the operations of some clients.
tests/testing/test_conformance.py runs every operation of every client against every server of its API, and
``python -m tests.testing.conformance.table`` writes the results into docs/testing.md.
"""
