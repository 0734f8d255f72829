"""What Ray Serve's proxy is told of the generation service (`grpc_servicer_functions`)."""

from typing import Any

import grpc

from coppice.v1 import generation_pb2 as pb


def add_GenerationServiceServicer_to_server(servicer: Any, server: Any) -> None:
    """Register the methods of a servicer, named as a compiler would name this."""
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
        ),
        "DescribeModel": grpc.unary_unary_rpc_method_handler(
            servicer.DescribeModel, pb.DescribeModelRequest.FromString, pb.DescribeModelResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("coppice.v1.GenerationService", handlers),))
