"""Code generated from protos/peer.proto. Only wire, rpc_client and rpc_server import it."""
