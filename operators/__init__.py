"""The language: typed word streams, reversible operators, literal encodings, programs and records.

Restoring an archive needs this package and a store, nothing else of the project.
"""
