"""The engine: requests in, tokens out. Pure: no torch, no grpc, no clock of its own."""
