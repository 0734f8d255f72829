"""The messages as plain values with the bounds of every field, and the only code that touches protobuf.

A file for each service. `*_to_wire` makes a message; each `read_*` turns an untrusted one into a plain value or raises
InvalidField naming the field. Trees are read without judging them: `tree.validate` does that where a bad one can be
dropped.
"""
