"""The messages and services of protos/, a module for each file: `from coppice.v1 import common_pb2`.

They are made of coppice.binpb, the descriptor set that is the contract for other languages too: modules that a compiler
generates would hold the same bytes once more, for some versions of protobuf. The *.pyi beside it are for type checkers.
"""

import sys
from pathlib import Path
from types import ModuleType

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.internal import builder  # what generated modules call


def _add_module(file: FileDescriptorProto) -> None:
    """Make the module of a proto file, whose imports have theirs."""
    stem = f"{Path(file.name).stem}_pb2"
    module = ModuleType(f"{__name__}.{stem}", f"The messages of {file.name}.")
    names = vars(module)
    names["DESCRIPTOR"] = descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    builder.BuildMessageAndEnumDescriptors(names["DESCRIPTOR"], names)
    builder.BuildTopDescriptorsAndMessages(names["DESCRIPTOR"], module.__name__, names)
    sys.modules[module.__name__] = globals()[stem] = module


for _file in FileDescriptorSet.FromString((Path(__file__).parent / "coppice.binpb").read_bytes()).file:
    _add_module(_file)
