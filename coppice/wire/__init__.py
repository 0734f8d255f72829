"""The only package that touches protobuf messages.

`*_to_wire` makes a message; each `read_*` turns an untrusted one into a plain value or raises InvalidField naming
the field. Trees are read without judging them: `tree.validate` does that where a bad one can be dropped.
"""
